// Noise for gossip in closed form, on graphs on which all agents have the same place.
//
// There the optimum has one precision for all agents, so that R is A^(-1/2) times a number, where
// A is the objective of corn.covariance.objective, with its defaults: noise that accumulates over a
// fifth of the run, disagreement weighted by 0.1, and the default momentum. The ratio to a trusted
// server's noise in the average is then the sum of the roots of A's eigenvalues, over the root of
// that of the average.
corn.gossip = (() => {
  "use strict";
  const DISAGREEMENT_WEIGHT = 0.1;

  /** Return the eigenvalues of W beside that of the average, or null for other graphs. */
  function mixing(graph, agents) {
    const modes = Array.from({ length: agents - 1 }, (_, k) => k + 1);
    if (graph === "complete") return modes.map(() => 0);
    if (graph === "ring") return modes.map((k) => (1 + 2 * Math.cos((2 * Math.PI * k) / agents)) / 3);
    return null;
  }

  /** Return the noise variance of the average over a trusted server's, against an eavesdropper. */
  function centralRatio(graph, agents, steps) {
    const others = mixing(graph, agents);
    if (others === null) return null;
    const discount = 1 - 1 / Math.max(1, steps / 5);
    const momentum = Math.min(Math.max(1 - 6 / steps, 0), 0.97);
    const energy = (w) => {
      const faded = Math.sqrt(discount) * w * momentum;
      const gain = (1 - faded ** 2) / (1 - faded) ** 2;
      return (w ** 2 / (1 - discount * w ** 2)) * gain;
    };
    const average = energy(1);
    return others.reduce((sum, w) => sum + Math.sqrt((DISAGREEMENT_WEIGHT * energy(w)) / average), 1);
  }

  return { centralRatio };
})();
