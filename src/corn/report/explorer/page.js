// The page: settings in, pictures out. Slow computations run in two workers.
corn.page = (() => {
  "use strict";
  const { designs, drawing, exports, networks, promises } = corn;
  const byId = (id) => document.getElementById(id);
  const MOST_AGENTS = 40;
  const MOST_FOR_TWO = 20; // agents: beyond, a design against two insiders takes minutes here
  const core = byId("core").textContent;
  const designer = new corn.workers.TaskRunner(core);
  const accountant = new corn.workers.TaskRunner(core);
  const graphs = JSON.parse(byId("graphs").textContent);
  const known = new Map(); // designs by network and objective; they do not depend on the promise
  const FILES = {
    commandLine: ["plan.sh", ""],
    pythonLines: ["design.py", ""],
    planRequest: [
      "request.json",
      "For agents that make the plan together, without a planner: corn agent --request request.json.",
    ],
    edgeList: ["drawn.edges", "The drawn graph. Save it beside the command or script that names it."],
  };

  const state = { insiders: new Set(), selected: null, last: 0, round: 0, accounts: 0 };

  function openGraph(index) {
    const { source, links, places } = graphs[index];
    Object.assign(state, { source, selected: null, last: 0 });
    state.links = links.map((link) => [...link]);
    state.places = places.map((place) => [...place]);
    state.insiders = new Set();
  }

  // Settings

  function read() {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const promise = {
      unit: byId("unit").value,
      epsilon: number("epsilon"),
      delta: number("delta"),
      steps: number("steps"),
      clip: number("clip"),
      sampling: byId("sampling").value,
      batch: number("batch"),
      samples: number("samples"),
    };
    const usual = networks.defaultObjective(promise.steps ?? 1);
    const objective = Object.fromEntries(
      ["length", "weight", "momentum"].map((name) => [name, number(name) ?? usual[name]]),
    );
    for (const name of Object.keys(usual)) byId(name).placeholder = usual[name];
    return {
      source: state.source,
      agents: state.places.length,
      links: state.links,
      insiders: state.insiders,
      promise,
      objective,
      colluders: Number(byId("colluders").value),
      mechanism: byId("mechanism").value,
    };
  }

  function problemOf({ agents, links, promise, objective, colluders, mechanism, insiders }) {
    if (!networks.isConnected(agents, links)) return "The graph is not connected: link its parts.";
    if (insiders.size >= agents) return "Leave at least one agent that is not an insider.";
    if (colluders >= agents) return "There are fewer agents than insiders to design against.";
    if (mechanism === "corn" && colluders === 2 && agents > MOST_FOR_TWO) {
      return `Against two insiders, this page designs for up to ${MOST_FOR_TWO} agents; corn threat for more.`;
    }
    if (!(objective.length >= 1 && objective.length <= 1e9)) return "The horizon must be from 1 on.";
    if (!(objective.weight >= 1e-6 && objective.weight <= 1)) {
      return "The weight of disagreement must be above 0 and at most 1.";
    }
    if (!(objective.momentum >= 0 && objective.momentum <= 0.999)) {
      return "The momentum must be from 0 to 0.999.";
    }
    return promises.problemOf(promise);
  }

  function keyOf({ agents, links, objective }, what) {
    return JSON.stringify([agents, links, objective, what]);
  }

  // Computation: each update has a number, and results of older ones are dropped.

  function update() {
    const round = ++state.round;
    const settings = read();
    byId("sampling-fields").hidden = settings.promise.unit !== "sample";
    byId("samples").disabled = settings.promise.sampling === "every-step";
    byId("colluders").disabled = settings.mechanism !== "corn";
    byId("edges-form").hidden = settings.source !== null;
    if (settings.source === null) byId("graph").value = "drawn";
    state.problem = problemOf(settings);
    state.view = { settings, cap: null, epsilons: null, power: null };
    render();
    if (state.problem) return designer.stop();
    watchFor(designAll(settings, round));
    watchFor(account(settings, round));
  }

  /** Show why a computation failed, unless a newer one replaced it. */
  async function watchFor(computation) {
    try {
      await computation;
    } catch (error) {
      if (error instanceof corn.workers.AbandonedError) return;
      show(`This could not be computed: ${error.message}`, true);
    }
  }

  async function designAll(settings, round) {
    const wanted = ["outsiders", 1];
    if (settings.colluders === 2 && settings.mechanism === "corn") wanted.splice(1, 0, 2);
    for (const what of wanted) {
      const key = keyOf(settings, what);
      if (known.has(key) || what >= settings.agents) continue;
      const name = what === "outsiders" ? what : "insiders";
      const watch = (evaluations) => {
        if (round === state.round) state.progress = `designing: ${evaluations} evaluations so far`;
        if (round === state.round) renderVerdict();
      };
      const { agents, links, objective } = settings;
      const found = await designer.run(name, { agents, links, objective, colluders: what }, watch);
      known.set(key, found);
      if (round !== state.round) return;
      state.progress = "";
      render();
      watchFor(account(settings, round));
    }
  }

  /** Compute epsilon and attacks: at once for Gaussian DP, in a worker under Poisson sampling. */
  async function account(settings, round) {
    const number = ++state.accounts;
    const isOld = () => round !== state.round || number !== state.accounts;
    const { promise, insiders } = settings;
    const falseAlarms = Number(byId("alarms").value);
    const split = splitOf(settings);
    const run = promises.isSampled(promise)
      ? (name, own) => accountant.run(name, { promise, ...own })
      : async (name, own) => corn.tasks[name]({ promise, ...own });
    const view = state.view;
    const cap = await cached(`cap ${JSON.stringify(promise)}`, () => run("cap", {}));
    if (isOld()) return;
    view.cap = cap;
    if (!split) return render();
    // Designs are for a cap of 1: their precisions scale with the cap.
    view.precisions = designs
      .hiddenPrecision(split, [...insiders])
      .map((entry) => (entry === null ? null : entry * cap));
    const worst = Math.max(...view.precisions.filter((entry) => entry !== null));
    const epsilons = await run("epsilons", { precisions: view.precisions });
    if (isOld()) return;
    view.epsilons = epsilons;
    const power = await run("power", { precision: worst, falseAlarms });
    if (isOld()) return;
    view.power = power;
    render();
  }

  function cached(key, compute) {
    if (!known.has(key)) {
      known.set(
        key,
        compute().catch((error) => {
          known.delete(key);
          throw error;
        }),
      );
    }
    return known.get(key);
  }

  /** Return the noise of the chosen mechanism and threat, if it was computed. */
  function splitOf(settings) {
    const { mechanism, colluders } = settings;
    if (mechanism === "corn" && colluders) return known.get(keyOf(settings, colluders))?.split;
    return known.get(keyOf(settings, "outsiders"))?.[mechanism];
  }

  // Output

  function render() {
    renderGraph();
    renderVerdict();
    renderFacts();
    renderCosts();
    renderExport();
  }

  function renderGraph() {
    const { settings, epsilons } = state.view;
    drawing.drawGraph(byId("picture"), {
      places: state.places,
      links: state.links,
      insiders: state.insiders,
      selected: state.selected,
      epsilons: state.problem ? null : epsilons,
      promised: settings.promise.epsilon,
      act,
      drop: (agent, place) => {
        state.places[agent] = place;
        renderGraph();
      },
    });
  }

  function show(text, isProblem) {
    byId("verdict").textContent = text;
    byId("verdict").className = isProblem ? "problem" : "";
  }

  function renderVerdict() {
    const { settings, epsilons } = state.view;
    if (state.problem) return show(state.problem, true);
    if (!epsilons) return show(state.progress || "computing …", false);
    const { promise, insiders, mechanism, colluders } = settings;
    const worst = Math.max(...epsilons.filter((value) => value !== null));
    const agent = epsilons.indexOf(worst);
    const marked = [...insiders].sort((a, b) => a - b);
    const whom = marked.length
      ? `an eavesdropper together with ${marked.length > 1 ? "insiders" : "insider"} ${marked.join(", ")}`
      : "an eavesdropper who sees every message";
    const sentence = `Against ${whom}, the largest ε is ${drawing.formatEpsilon(worst)}, of agent ${agent}.`;
    show(`${sentence} ${judge(worst, promise.epsilon, marked.length, mechanism, colluders)}`, false);
  }

  function judge(worst, promised, size, mechanism, colluders) {
    if (worst <= promised * 1.005) {
      return size ? "The promise holds." : "The promise holds. Mark insiders to see what they learn.";
    }
    if (mechanism === "decor") return "DECOR has no guarantee against insiders.";
    const designed = ["an eavesdropper only", "one insider", "two insiders"][colluders];
    return `The promise of ${promised} is broken: this noise was designed against ${designed}.`;
  }

  function renderFacts() {
    const { settings, cap, epsilons, precisions, power } = state.view;
    const split = state.problem ? null : splitOf(settings);
    const rows = [];
    const spread = cap && split ? noiseOf(split, cap) : null;
    const { promise } = settings;
    const unit = promise.unit === "agent" ? "an agent’s whole data set" : "one sample";
    rows.push(["promise", `ε = ${promise.epsilon}, δ = ${promise.delta} for ${unit}`]);
    if (cap && !state.problem) rows.push(["independent noise", `σ = ${(cap ** -0.5).toPrecision(4)}`]);
    if (spread) {
      const [least, most] = [Math.min(...spread), Math.max(...spread)].map((x) => x.toPrecision(4));
      rows.push(["this noise", least === most ? `σ = ${least}` : `σ = ${least} to ${most}`]);
    }
    if (spread) rows.push(["in the average", `σ = ${averageOf(split, cap).toPrecision(4)}`]);
    byId("facts").replaceChildren(
      ...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]),
    );
    byId("table").replaceChildren(
      ...(epsilons && precisions && spread ? epsilons : []).map((epsilon, agent) => {
        const text = epsilon === null ? "insider" : drawing.formatEpsilon(epsilon);
        const cells = [agent, text, spread[agent].toPrecision(4)];
        const row = element("tr");
        row.append(...cells.map((cell) => element("td", cell)));
        return row;
      }),
    );
    renderAttack(power);
  }

  function renderAttack(power) {
    if (power === null || state.problem) {
      byId("attack").textContent = "";
      byId("cases").replaceChildren();
      return;
    }
    const alarms = Number(byId("alarms").value);
    const caught = 100 * power;
    const text = caught < 10 ? Number(caught.toPrecision(2)) : Math.round(caught);
    const guessed = 100 * alarms;
    byId("attack").textContent =
      `At 1 false alarm in ${1 / alarms}, the best attack on the least protected agent catches ` +
      `${text} of 100. Guessing catches ${guessed} of 100.`;
    drawing.drawCases(byId("cases"), power);
  }

  function noiseOf(split, cap) {
    const n = split.theta.length;
    const R = designs.hiddenFrom(split);
    return Array.from({ length: n }, (_, i) => Math.sqrt(R[i * n + i] / cap));
  }

  function averageOf(split, cap) {
    return Math.sqrt(designs.centralRatio(split) / cap) / split.theta.length;
  }

  function renderCosts() {
    const { settings } = state.view;
    const outsiders = known.get(keyOf(settings, "outsiders"));
    const ratio = (split) => (split ? designs.centralRatio(split) : null);
    const against = (q) => ratio(known.get(keyOf(settings, q))?.split);
    // A search that ended early is private all the same; its distance from the best is stated.
    const excess = (q) => {
      const gap = known.get(keyOf(settings, q))?.gap;
      return gap > 0.01 && isFinite(gap) ? `, energy ≤ ${(100 * gap).toFixed(1)} % above the best` : "";
    };
    const row = (label, remark, kind, value) => ({ label, remark, kind, value });
    const rows = [
      row("trusted server", "sees all gradients", "server", 1),
      row("CorN", "against an eavesdropper", "corn", ratio(outsiders?.corn)),
    ];
    if (settings.agents > 1) rows.push(row("CorN", `and one insider${excess(1)}`, "corn", against(1)));
    if (settings.colluders === 2 && settings.mechanism === "corn") {
      rows.push(row("CorN", `and two insiders${excess(2)}`, "corn", against(2)));
    }
    rows.push(row("DECOR", "against an eavesdropper", "decor", ratio(outsiders?.decor)));
    rows.push(row("LDP", "against any insiders", "ldp", ratio(outsiders?.ldp)));
    drawing.drawCosts(byId("costs"), state.problem ? rows.slice(0, 1) : rows, settings.agents);
    const words = rows.map(({ label, remark, value }) => {
      return `${label}, ${remark}: ${value === null ? "computing" : value.toFixed(2)}`;
    });
    byId("costs").setAttribute("aria-label", `Times a trusted server’s noise. ${words.join("; ")}`);
  }

  function renderExport() {
    const { settings } = state.view;
    const chosen = document.querySelector("input[name=form]:checked").value;
    const form = chosen === "edgeList" && settings.source !== null ? "commandLine" : chosen;
    const text = state.problem ? "" : exports[form](settings);
    const [file, hint] = FILES[form];
    byId("export").textContent = text;
    byId("export-hint").textContent = hint;
    byId("download").href = `data:text/plain;charset=utf-8,${encodeURIComponent(text)}`;
    byId("download").download = file;
  }

  function element(name, text = "") {
    const node = document.createElement(name);
    node.textContent = text;
    return node;
  }

  // Actions

  function act(agent) {
    const tool = document.querySelector("input[name=tool]:checked").value;
    state.last = agent;
    if (tool === "mark") toggle(state.insiders, agent);
    if (tool === "remove") removeAgent(agent);
    if (tool === "link") linkAgent(agent);
    update();
  }

  function toggle(set, item) {
    if (!set.delete(item)) set.add(item);
  }

  function linkAgent(agent) {
    const other = state.selected;
    state.selected = other === null ? agent : null;
    if (other === null || other === agent) return;
    const pair = [Math.min(agent, other), Math.max(agent, other)];
    const place = state.links.findIndex(([i, j]) => i === pair[0] && j === pair[1]);
    if (place < 0) state.links.push(pair);
    else state.links.splice(place, 1);
    state.source = null;
  }

  function removeAgent(agent) {
    if (state.places.length <= 2) return;
    const rename = (i) => (i > agent ? i - 1 : i);
    state.places.splice(agent, 1);
    state.links = state.links.filter((link) => !link.includes(agent)).map((link) => link.map(rename));
    state.insiders = new Set([...state.insiders].filter((i) => i !== agent).map(rename));
    Object.assign(state, { source: null, selected: null, last: 0 });
  }

  function addAgent() {
    if (state.places.length >= MOST_AGENTS) return;
    // Next to the agent that was used last, where there is most room.
    const [x, y] = state.places[state.last];
    const room = ([u, v]) => Math.min(...state.places.map(([a, b]) => Math.hypot(a - u, b - v)));
    const spots = Array.from({ length: 16 }, (_, k) => [
      Math.min(Math.max(x + 14 * Math.cos((k * Math.PI) / 8), 5), 95),
      Math.min(Math.max(y + 14 * Math.sin((k * Math.PI) / 8), 5), 93),
    ]);
    spots.sort((a, b) => room(b) - room(a));
    state.links.push([state.last, state.places.length]);
    state.places.push(spots[0]);
    state.source = null;
    update();
  }

  function connect(id, toSlider, fromSlider) {
    const [field, slider] = [byId(id), byId(`${id}-slider`)];
    slider.addEventListener("input", () => {
      field.value = fromSlider(Number(slider.value));
      later();
    });
    field.addEventListener("input", () => (slider.value = toSlider(Number(field.value))));
    slider.value = toSlider(Number(field.value));
  }

  let timer = 0;
  function later() {
    clearTimeout(timer);
    timer = setTimeout(update, 120);
  }

  async function copy() {
    const text = byId("export").textContent;
    // Without a secure context there is no clipboard: the text is selected instead.
    if (navigator.clipboard) await navigator.clipboard.writeText(text).catch(select);
    else select();
    byId("copy").textContent = "Copied";
    setTimeout(() => (byId("copy").textContent = "Copy"), 1500);
  }

  function select() {
    getSelection().selectAllChildren(byId("export"));
  }

  function start() {
    const usual = { epsilon: 1, delta: 1e-5, steps: 1000, clip: 0.1, batch: 64, samples: 2000 };
    for (const [id, value] of Object.entries(usual)) byId(id).value = value;
    byId("colluders").value = "1";
    byId("alarms").value = "0.01";
    graphs.forEach(({ source, places }, index) => {
      byId("graph").append(new Option(`${source} (${places.length} agents)`, index));
    });
    const drawn = new Option("your drawing", "drawn");
    drawn.disabled = true;
    byId("graph").append(drawn);
    byId("graph").addEventListener("change", (event) => {
      openGraph(Number(event.target.value));
      update();
    });
    connect("epsilon", Math.log, (x) => Number(Math.exp(x).toPrecision(2)));
    connect("delta", Math.log10, (x) => 10 ** x);
    connect("steps", Math.log10, (x) => Number((10 ** x).toPrecision(2)));
    byId("settings").addEventListener("input", (event) => event.target.id !== "graph" && later());
    byId("alarms").addEventListener("change", update);
    byId("add").addEventListener("click", addAgent);
    byId("clear").addEventListener("click", () => (state.insiders.clear(), update()));
    byId("copy").addEventListener("click", copy);
    for (const input of document.querySelectorAll("input[name=form]")) {
      input.addEventListener("change", renderExport);
    }
    for (const input of document.querySelectorAll("input[name=tool]")) {
      input.addEventListener("change", () => ((state.selected = null), renderGraph()));
    }
    openGraph(0);
    update();
  }

  start();
  return { state };
})();
