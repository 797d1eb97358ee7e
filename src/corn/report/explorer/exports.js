// The settings of the page as commands and as Python lines.
//
// Settings are {graph, agents, promise, colluders, insiders}.
corn.exports = (() => {
  "use strict";

  /** Return commands that make the plan, check it and compare mechanisms. */
  function commandLine({ graph, promise, colluders }) {
    const shared = [
      `--graph ${quote(graph)}`,
      "--mixing sum",
      `--epsilon ${promise.epsilon}`,
      `--delta ${promise.delta.toExponential()}`,
      `--steps ${promise.steps}`,
      `--clip ${promise.clip}`,
    ];
    if (promise.unit === "sample") {
      shared.push("--unit sample", `--batch-size ${promise.batch}`, `--sampling ${promise.sampling}`);
      if (promise.sampling !== "every-step") shared.push(`--samples-per-agent ${promise.samples}`);
    }
    shared.push(`--colluders ${colluders}`);
    const lines = [
      ["corn plan", ...shared, "--out plan.corn"],
      ["corn verify plan.corn"],
      ["corn compare", ...shared],
    ];
    return lines.map(wrap).join("\n") + "\n";
  }

  function wrap(parts) {
    const lines = [""];
    for (const part of parts) {
      const last = lines[lines.length - 1];
      if (last && last.length + part.length > 44) lines.push(`  ${part}`);
      else lines[lines.length - 1] = last ? `${last} ${part}` : part;
    }
    return lines.join(" \\\n");
  }

  /** Return Python lines that design the noise and print what the page shows. */
  function pythonLines({ graph, promise, colluders, insiders }) {
    const fields = [
      `epsilon=${promise.epsilon}`,
      `delta=${promise.delta.toExponential()}`,
      `num_steps=${promise.steps}`,
      `clip=${promise.clip}`,
    ];
    if (promise.unit === "sample") {
      fields.push('unit="sample"', `batch_size=${promise.batch}`, `sampling="${promise.sampling}"`);
      if (promise.sampling !== "every-step") fields.push(`samples_per_agent=${promise.samples}`);
    }
    return [
      "import corn",
      "",
      `network = corn.load_network(${JSON.stringify(graph)}, mixing="sum")`,
      "budget = corn.PrivacyBudget(",
      ...fields.map((field) => `    ${field},`),
      ")",
      `noise = corn.design(network, budget, threat=corn.ThreatModel(${colluders}))`,
      "print(noise.central_ratio)  # noise variance of the average, over a trusted server's",
      `insiders = range(${insiders})`,
      `exposure = corn.expose(noise.decomposition, insiders, budget.query, num_steps=${promise.steps})`,
      `print(exposure.epsilon(${promise.delta.toExponential()}))  # of each agent, against these insiders`,
      "",
    ].join("\n");
  }

  function quote(text) {
    return /^[\w.:=,/-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
  }

  return { commandLine, pythonLines };
})();
