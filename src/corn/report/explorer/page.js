// The page: settings in, pictures out. Slow computations run in two workers.
corn.page = (() => {
  "use strict";
  const { designs, promises } = corn;
  const { byId, graphs, keyOf, known, openGraph, problemOf, read, splitOf, state } = corn.settings;
  const { render, renderExport, renderGraph, renderVerdict, show } = corn.outputs;
  const MOST_AGENTS = 40;
  const core = byId("core").textContent;
  const designer = new corn.workers.TaskRunner(core);
  const accountant = new corn.workers.TaskRunner(core);

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
  return { act, state };
})();
