// The settings of the page as a command line, as Python lines and as the request for a plan.
//
// Settings are {source, agents, links, promise, objective, colluders, mechanism, insiders}.
corn.exports = (() => {
  "use strict";
  const DRAWN = "drawn.edges";

  function graphName({ source }) {
    return source ?? DRAWN;
  }

  /** Return the options of a budget, an objective and a threat, those with usual values included. */
  function options(settings) {
    const { promise, objective } = settings;
    const parts = [
      `--graph ${quote(graphName(settings))}`,
      `--epsilon ${promise.epsilon}`,
      `--delta ${number(promise.delta)}`,
      `--steps ${promise.steps}`,
      `--clip ${promise.clip}`,
    ];
    if (promise.unit === "sample") {
      parts.push("--unit sample", `--batch-size ${promise.batch}`, `--sampling ${promise.sampling}`);
      if (promise.sampling !== "every-step") parts.push(`--samples-per-agent ${promise.samples}`);
    }
    parts.push(`--horizon ${objective.length}`, `--disagreement-weight ${objective.weight}`);
    parts.push(`--momentum ${objective.momentum}`);
    return parts;
  }

  /** Return commands that make the plan, check it and compare mechanisms. */
  function commandLine(settings) {
    const shared = options(settings);
    const { mechanism } = settings;
    const threat = `--colluders ${colluders(settings)}`;
    const chosen = mechanism === "corn" ? [] : [`--mechanism ${mechanism}`];
    const lines = [
      ["corn plan", ...shared, threat, ...chosen, "--out plan.corn"],
      ["corn verify plan.corn"],
      ["corn compare", ...shared, `--colluders ${settings.colluders}`],
    ];
    return lines.map((parts) => wrap(parts)).join("\n") + "\n";
  }

  /** Return the number of insiders; DECOR is for none. */
  function colluders({ mechanism, colluders: number }) {
    return mechanism === "decor" ? 0 : number;
  }

  function wrap(parts) {
    const lines = [""];
    for (const part of parts) {
      const last = lines[lines.length - 1];
      if (last && last.length + part.length > 56) lines.push(`  ${part}`);
      else lines[lines.length - 1] = last ? `${last} ${part}` : part;
    }
    return lines.join(" \\\n");
  }

  /** Return Python lines that design the noise and print what the page shows. */
  function pythonLines(settings) {
    const { promise, objective, mechanism, insiders } = settings;
    const fields = [
      `epsilon=${promise.epsilon}`,
      `delta=${number(promise.delta)}`,
      `num_steps=${promise.steps}`,
      `clip=${promise.clip}`,
    ];
    if (promise.unit === "sample") {
      fields.push('unit="sample"', `batch_size=${promise.batch}`);
      fields.push(`sampling="${promise.sampling}"`);
      if (promise.sampling !== "every-step") fields.push(`samples_per_agent=${promise.samples}`);
    }
    const { length, weight, momentum } = objective;
    const coalition = `[${[...insiders].join(", ")}]`;
    return [
      "import corn",
      "",
      `network = corn.load_network(${JSON.stringify(graphName(settings))})`,
      "budget = corn.PrivacyBudget(",
      ...fields.map((field) => `    ${field},`),
      ")",
      "noise = corn.design(",
      "    network,",
      "    budget,",
      `    mechanism="${mechanism}",`,
      `    objective=corn.Horizon(${length}, ${weight}, ${momentum}),`,
      `    threat=corn.ThreatModel(${colluders(settings)}),`,
      ")",
      "print(noise.central_ratio)  # noise in the average, over a trusted server's",
      `exposure = corn.expose(noise.decomposition, ${coalition}, budget.query, num_steps=${promise.steps})`,
      `print(exposure.epsilon(${number(promise.delta)}))  # of each agent, against these insiders`,
      "",
    ].join("\n");
  }

  /** Return the request from which agents make a plan together: corn agent --request. */
  function planRequest(settings) {
    const { promise, objective, mechanism } = settings;
    const isSample = promise.unit === "sample";
    const needsSamples = isSample && promise.sampling !== "every-step";
    const request = {
      budget: {
        accounting: "gdp",
        adjacency: "replace",
        batch_size: isSample ? promise.batch : null,
        clip: promise.clip,
        delta: promise.delta,
        epsilon: promise.epsilon,
        num_steps: promise.steps,
        samples_per_agent: needsSamples ? promise.samples : null,
        sampling: isSample ? promise.sampling : "every-step",
        sampling_rate: null,
        unit: promise.unit,
      },
      cooldown_steps: null,
      dtype: "float32",
      gossip: { kind: "plain", rounds: 1 },
      mechanism,
      mixing: "gossip",
      objective: {
        disagreement_weight: objective.weight,
        length: objective.length,
        momentum: objective.momentum,
      },
      threat: {
        max_colluders: colluders(settings),
        private_noise: "per-agent",
        seeds: colluders(settings) ? "auto" : "global",
      },
      weights: null,
    };
    return JSON.stringify(request, null, 1) + "\n";
  }

  /** Return the links as an edge list, for a graph that was drawn. */
  function edgeList({ links }) {
    return links.map(([i, j]) => `${i} ${j}\n`).join("");
  }

  /** Return a number as both Python and the shell read it. */
  function number(value) {
    return String(value);
  }

  function quote(text) {
    return /^[\w.:=,/-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
  }

  return { commandLine, edgeList, planRequest, pythonLines };
})();
