// Noise for exact sums in closed form, as corn.covariance.masks designs it.
//
// Masks cancel in the sum and cost nothing. The private noise of the agents that are not insiders
// adds up to what a trusted server would add, so n agents of which q collude need n/(n - q) times
// its variance in the average. Seeds join all agents that are not insiders.
corn.sums = (() => {
  "use strict";
  const { promises } = corn;

  /** Return the noise variance of the average over that of a trusted server. */
  function centralRatio(agents, colluders) {
    return agents / (agents - colluders);
  }

  /** Return the precision of an honest agent's data against so many insiders. */
  function precision(cap, agents, colluders, insiders) {
    return (cap * (agents - colluders)) / (agents - insiders);
  }

  /** Return the numbers of insiders to list: 0, 1, 2, 5, 10, … and those of the settings. */
  function sizes(agents, ...others) {
    const usual = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500];
    const listed = [...new Set([...usual, ...others])].filter((size) => size < agents);
    return listed.sort((a, b) => a - b);
  }

  /** Return cap, epsilon by number of insiders, and power of the best attack. */
  function account({ promise, agents, colluders, insiders, falseAlarms }) {
    const cap = promises.precisionCap(promise);
    const against = (size) => precision(cap, agents, colluders, size);
    const rows = sizes(agents, colluders, insiders).map((size) => ({
      size,
      epsilon: promises.epsilonOf(against(size), promise),
    }));
    const { epsilon } = rows.find(({ size }) => size === insiders);
    const power = promises.powerOf(against(insiders), promise, falseAlarms);
    return { cap, epsilon, rows, power };
  }

  return { account, centralRatio, precision };
})();
