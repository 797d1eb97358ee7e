// The output of the page: the graph, the verdict, the noise, the costs and the exports.
corn.outputs = (() => {
  "use strict";
  const { designs, drawing, exports } = corn;
  const { byId, keyOf, known, splitOf, state } = corn.settings;
  const FILES = {
    commandLine: ["plan.sh", ""],
    pythonLines: ["design.py", ""],
    planRequest: [
      "request.json",
      "For agents that make the plan together, without a planner: corn agent --request request.json.",
    ],
    edgeList: ["drawn.edges", "The drawn graph. Save it beside the command or script that names it."],
  };

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
      act: (agent) => corn.page.act(agent),
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
    // A search that ended early is still private; its distance from the best is stated.
    const excess = (q) => {
      const gap = known.get(keyOf(settings, q))?.gap;
      return gap > 0.01 && isFinite(gap) ? `, energy ≤ ${(Math.ceil(1000 * gap) / 10).toFixed(1)} % above the best` : "";
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

  return { render, renderExport, renderGraph, renderVerdict, show };
})();
