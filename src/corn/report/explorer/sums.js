// Noise for exact sums in closed form, as corn.covariance.masks designs it.
//
// Masks cancel in the sum and cost nothing. The private noise of the agents that are not insiders
// adds up to what a trusted server would add, so n agents of which q collude need n/(n - q) times
// its variance in the average. Seeds join all agents that are not insiders.
//
// A promise {epsilon, delta, steps, clip} protects an agent's whole data set, which is replaced.
corn.sums = (() => {
  "use strict";
  const { gaussian } = corn;

  /** Return the largest [R^-1]_ii that keeps the promise. */
  function precisionCap({ epsilon, delta, steps, clip }) {
    return (gaussian.muFrom(epsilon, delta) / (2 * clip)) ** 2 / steps;
  }

  /** Return why a promise has no meaning, or null. */
  function problemOf({ epsilon, delta, steps, clip }) {
    if (!(epsilon > 0 && epsilon <= 100)) return "ε must be above 0 and at most 100.";
    if (!(delta >= 1e-10 && delta <= 0.1)) return "δ must be from 1e-10 to 0.1.";
    if (!(Number.isInteger(steps) && steps >= 1 && steps <= 1e6)) {
      return "Steps must be a whole number from 1 to 1,000,000.";
    }
    return clip > 0 && clip <= 1e6 ? null : "The clip must be above 0.";
  }

  /** Return the noise variance of the average over that of a trusted server. */
  function centralRatio(agents, colluders) {
    return agents / (agents - colluders);
  }

  /** Return the numbers of insiders to list: 0, 1, 2, 5, 10, … and those of the settings. */
  function sizes(agents, ...others) {
    const usual = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500];
    const listed = [...new Set([...usual, ...others])].filter((size) => size < agents);
    return listed.sort((a, b) => a - b);
  }

  /** Return cap, epsilon by number of insiders, and power of the best attack. */
  function account({ promise, agents, colluders, insiders, falseAlarms }) {
    const cap = precisionCap(promise);
    const muOf = (size) => {
      const precision = (cap * (agents - colluders)) / (agents - size);
      return 2 * promise.clip * Math.sqrt(precision * promise.steps);
    };
    const rows = sizes(agents, colluders, insiders).map((size) => ({
      size,
      epsilon: gaussian.epsilonFrom(muOf(size), promise.delta),
    }));
    const { epsilon } = rows.find(({ size }) => size === insiders);
    return { cap, epsilon, rows, power: gaussian.power(muOf(insiders), falseAlarms) };
  }

  return { account, centralRatio, problemOf };
})();
