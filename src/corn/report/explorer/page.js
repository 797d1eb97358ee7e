// The page: settings in, pictures out.
corn.page = (() => {
  "use strict";
  const { drawing, gossip, sums } = corn;
  const { formatEpsilon } = drawing;
  const byId = (id) => document.getElementById(id);
  const given = JSON.parse(byId("given").textContent);
  const MOST_AGENTS = 1000;
  const state = { view: null };

  function read() {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const kind = byId("graph").value;
    const agents = kind === "given" ? given.agents : number("agents");
    return {
      kind: kind === "given" ? given.source.split(":n=")[0] : kind,
      graph: kind === "given" ? given.source : `${kind}:${agents}`,
      agents,
      colluders: number("colluders"),
      insiders: number("insiders"),
      falseAlarms: Number(byId("alarms").value),
      promise: {
        epsilon: number("epsilon"),
        delta: number("delta"),
        steps: number("steps"),
        clip: number("clip"),
      },
    };
  }

  function problemOf({ agents, colluders, insiders, promise }) {
    const isCount = (value, least, most) => Number.isInteger(value) && value >= least && value <= most;
    if (!isCount(agents, 3, MOST_AGENTS)) return `Agents must be from 3 to ${MOST_AGENTS}.`;
    if (!isCount(colluders, 0, agents - 2)) return "The design must leave two agents that do not collude.";
    if (!isCount(insiders, 0, agents - 1)) return "At least one agent must not be an insider.";
    return sums.problemOf(promise);
  }

  /** Compute what the page shows. */
  function update() {
    const settings = read();
    byId("agents").disabled = byId("graph").value === "given";
    if (byId("agents").disabled) byId("agents").value = given.agents;
    const problem = problemOf(settings);
    state.view = { settings, problem, found: problem ? null : sums.account(settings) };
    render();
  }

  // Output

  function show(text, isProblem) {
    byId("verdict").textContent = text;
    byId("verdict").className = isProblem ? "problem" : "";
  }

  function render() {
    const { settings, problem, found } = state.view;
    for (const part of document.querySelectorAll(".output")) part.hidden = Boolean(problem);
    if (problem) return show(problem, true);
    const isBroken = found.epsilon > settings.promise.epsilon * 1.005;
    drawing.drawAgents(byId("picture"), { ...settings, isBroken });
    renderVerdict(settings, found.epsilon, isBroken);
    byId("table").replaceChildren(
      ...found.rows.map(({ size, epsilon }) => row([size, formatEpsilon(epsilon)])),
    );
    renderFacts(settings, found.cap);
    renderAttack(settings.falseAlarms, found.power);
    renderCosts(settings);
    byId("export").textContent = commandLine(settings);
  }

  function renderVerdict({ promise, insiders, colluders }, epsilon, isBroken) {
    const whom = insiders
      ? `an eavesdropper together with ${insiders === 1 ? "1 insider" : `${insiders} insiders`}`
      : "an eavesdropper who sees every message";
    const judgement = isBroken
      ? `The promise of ${promise.epsilon} is broken: this noise was designed against ${colluders}.`
      : "The promise holds.";
    show(`Against ${whom}, ε of every other agent is ${formatEpsilon(epsilon)}. ${judgement}`, false);
  }

  function renderFacts({ agents, colluders, promise }, cap) {
    const sigma = (variance) => `σ = ${Math.sqrt(variance).toPrecision(4)}`;
    const facts = [
      ["promise", `ε = ${promise.epsilon}, δ = ${promise.delta.toExponential()} for an agent’s whole data set, clipped to ${promise.clip}`],
      ["private noise of an agent", sigma(1 / ((agents - colluders) * cap))],
      ["independent noise instead", sigma(1 / cap)],
      ["in the average", sigma(sums.centralRatio(agents, colluders) / cap / agents ** 2)],
      ["masks", "uniform, and gone from the sum"],
    ];
    const nodes = facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
    byId("facts").replaceChildren(...nodes);
  }

  function renderAttack(alarms, power) {
    const caught = 100 * power;
    const text = caught < 10 ? Number(caught.toPrecision(2)) : Math.round(caught);
    byId("attack").textContent =
      `At 1 false alarm in ${1 / alarms}, the best attack on an agent catches ${text} of 100. ` +
      `Guessing catches ${100 * alarms} of 100.`;
    drawing.drawCases(byId("cases"), power);
  }

  function renderCosts({ kind, agents, colluders, promise }) {
    const rows = [{ label: "trusted server", remark: "sees all gradients", kind: "server", value: 1 }];
    for (const size of new Set([0, 1, colluders])) {
      const insiders = size ? ` and ${size === 1 ? "1 insider" : `${size} insiders`}` : "";
      const remark = `against an eavesdropper${insiders}`;
      rows.push({ label: "CorN", remark, kind: "corn", value: sums.centralRatio(agents, size) });
    }
    const byGossip = gossip.centralRatio(kind, agents, promise.steps);
    if (byGossip !== null) {
      const remark = "against an eavesdropper";
      rows.push({ label: "CorN by gossip", remark, kind: "gossip", value: byGossip });
    }
    rows.push({ label: "LDP", remark: "against any insiders", kind: "ldp", value: agents });
    drawing.drawCosts(byId("costs"), rows, agents);
    const texts = rows.map(({ label, remark, value }) => `${label}, ${remark}: ${value.toFixed(2)}`);
    byId("costs").setAttribute("aria-label", `Times a trusted server’s noise. ${texts.join("; ")}`);
  }

  /** Return the command that makes the plan. */
  function commandLine({ graph, promise: { epsilon, delta, steps, clip }, colluders }) {
    const spec = /^[\w.:=,/-]+$/.test(graph) ? graph : `'${graph.replaceAll("'", `'"'"'`)}'`;
    return [
      `corn plan --graph ${spec} --mixing sum`,
      `--epsilon ${epsilon} --delta ${delta.toExponential()} --steps ${steps}`,
      `--clip ${clip} --colluders ${colluders} --out plan.corn`,
    ].join(" \\\n  ");
  }

  function element(name, text = "") {
    const node = document.createElement(name);
    node.textContent = text;
    return node;
  }

  function row(cells) {
    const node = element("tr");
    node.append(...cells.map((cell) => element("td", cell)));
    return node;
  }

  // Input

  function connect(id, toSlider, fromSlider) {
    const [field, slider] = [byId(id), byId(`${id}-slider`)];
    slider.addEventListener("input", () => {
      field.value = fromSlider(Number(slider.value));
      update();
    });
    field.addEventListener("input", () => (slider.value = toSlider(Number(field.value))));
    slider.value = toSlider(Number(field.value));
  }

  function start() {
    const usual = { agents: 20, colluders: 1, insiders: 1, epsilon: 1, delta: "1e-5", steps: 1000 };
    Object.assign(usual, { clip: 0.1, alarms: "0.01" });
    for (const [id, value] of Object.entries(usual)) byId(id).value = value;
    if (given) {
      byId("graph").prepend(new Option(`${given.source} (${given.agents} agents)`, "given"));
      byId("graph").value = "given";
    }
    connect("epsilon", Math.log, (x) => Number(Math.exp(x).toPrecision(2)));
    connect("delta", Math.log10, (x) => `1e${x}`);
    connect("steps", Math.log10, (x) => Number((10 ** x).toPrecision(2)));
    byId("settings").addEventListener("input", update);
    byId("insiders").addEventListener("input", update);
    byId("alarms").addEventListener("change", update);
    update();
  }

  start();
  return { state };
})();
