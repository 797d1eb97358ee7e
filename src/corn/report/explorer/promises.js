// The promise of a run: unit, sampling and (epsilon, delta), and what a given noise keeps of it.
//
// A promise is {unit, epsilon, delta, steps, clip, sampling, batch, samples}. Neighbouring data
// sets differ in one replaced unit.
corn.promises = (() => {
  "use strict";
  const { gaussian } = corn;

  /** Return the largest norm of the unit's part of one release. */
  function contribution({ unit, clip, batch }) {
    return unit === "agent" ? clip : clip / batch;
  }

  /** Return the most steps that use the unit's data. */
  function participations(promise) {
    if (promise.unit === "agent" || promise.sampling !== "passes") return promise.steps;
    return Math.ceil(promise.steps / Math.max(1, Math.floor(promise.samples / promise.batch)));
  }

  /** Return the largest [R^-1]_ii that keeps the promise. */
  function precisionCap(promise) {
    const mu = gaussian.muFrom(promise.epsilon, promise.delta);
    return (mu / (2 * contribution(promise))) ** 2 / participations(promise);
  }

  function muOf(precision, promise) {
    return 2 * contribution(promise) * Math.sqrt(precision * participations(promise));
  }

  /** Return the epsilon of an agent at [R^-1]_ii = precision. */
  function epsilonOf(precision, promise) {
    return gaussian.epsilonFrom(muOf(precision, promise), promise.delta);
  }

  /** Return the share of cases that the best attack catches at this rate of false alarms. */
  function powerOf(precision, promise, falseAlarms) {
    return gaussian.power(muOf(precision, promise), falseAlarms);
  }

  /** Return why a promise has no meaning, or null. */
  function problemOf(promise) {
    const { epsilon, delta, steps, clip, unit, batch, samples } = promise;
    if (!(epsilon > 0 && epsilon <= 100)) return "ε must be above 0 and at most 100.";
    if (!(delta >= 1e-10 && delta <= 0.1)) return "δ must be from 1e-10 to 0.1.";
    if (!(Number.isInteger(steps) && steps >= 1 && steps <= 1e6)) {
      return "Steps must be a whole number from 1 to 1,000,000.";
    }
    if (!(clip > 0 && clip <= 1e6)) return "The clip must be above 0.";
    if (unit === "agent") return null;
    if (!(Number.isInteger(batch) && batch >= 1)) return "The batch must be a whole number.";
    if (!(Number.isInteger(samples) && samples >= 1)) return "Samples must be a whole number.";
    return null;
  }

  return { epsilonOf, participations, powerOf, precisionCap, problemOf };
})();
