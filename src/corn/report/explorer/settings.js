// What the page shows: the graph, the settings of the form, and the designs that are known.
corn.settings = (() => {
  "use strict";
  const { networks, promises } = corn;
  const byId = (id) => document.getElementById(id);
  const MOST_FOR_TWO = 20; // agents: beyond, a design against two insiders takes minutes here
  const graphs = JSON.parse(byId("graphs").textContent);
  const known = new Map(); // designs by network and objective; they do not depend on the promise

  const state = { insiders: new Set(), selected: null, last: 0, round: 0, accounts: 0 };

  function openGraph(index) {
    const { source, links, places } = graphs[index];
    Object.assign(state, { source, selected: null, last: 0 });
    state.links = links.map((link) => [...link]);
    state.places = places.map((place) => [...place]);
    state.insiders = new Set();
  }

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
    if (!(objective.length >= 1 && objective.length <= 1e9)) return "The horizon must be from 1 to 1,000,000,000.";
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

  /** Return the noise of the chosen mechanism and threat, if it was computed. */
  function splitOf(settings) {
    const { mechanism, colluders } = settings;
    if (mechanism === "corn" && colluders) return known.get(keyOf(settings, colluders))?.split;
    return known.get(keyOf(settings, "outsiders"))?.[mechanism];
  }

  return { byId, graphs, keyOf, known, openGraph, problemOf, read, splitOf, state };
})();
