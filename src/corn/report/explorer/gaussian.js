// Exact Gaussian differential privacy, as corn.privacy.gaussian computes it.
//
// One run is as hard to attack as telling N(0, 1) from N(mu, 1). Searches end on the private side.
corn.gaussian = (() => {
  "use strict";
  const STEP = 0.5; // of the trapezoidal rule: its error is exp(-(pi / STEP)^2), below 1e-17
  const TERMS = 13; // the next one is below 1e-19

  /** Return exp(x^2) erfc(x), to about 1e-14 relative. */
  function erfcx(x) {
    if (x < 0) return 2 * Math.exp(x * x) - erfcx(-x);
    if (x < 0.5) return Math.exp(x * x) * (1 - erfSeries(x));
    if (x > 1e8) return 1 / (x * Math.sqrt(Math.PI));
    // The trapezoidal rule for x/pi * integral of exp(-t^2)/(t^2 + x^2) over all t.
    let sum = 1 / (x * x);
    for (let k = 1; k <= TERMS; k++) {
      const t = k * STEP;
      sum += (2 * Math.exp(-t * t)) / (t * t + x * x);
    }
    const value = (STEP * x * sum) / Math.PI;
    // The pole at t = ix lies inside the strip of the rule for small x, and its residue is known.
    return x < Math.PI / STEP
      ? value - (2 * Math.exp(x * x)) / Math.expm1((2 * Math.PI * x) / STEP)
      : value;
  }

  function erfSeries(x) {
    let term = x;
    let sum = x;
    for (let k = 1; Math.abs(term) > 1e-18 * Math.abs(sum); k++) {
      term *= (-x * x) / k;
      sum += term / (2 * k + 1);
    }
    return (2 / Math.sqrt(Math.PI)) * sum;
  }

  /** Return the normal distribution function; its lower tail keeps its relative accuracy. */
  function cdf(x) {
    if (x > 0) return 1 - cdf(-x);
    if (x < -38) return 0;
    return 0.5 * Math.exp((-x * x) / 2) * erfcx(-x / Math.SQRT2);
  }

  /** Return the normal quantile by bisection. */
  function quantile(probability) {
    if (probability > 0.5) return -quantile(1 - probability);
    return bisect((x) => cdf(x) <= probability, -40, 0);
  }

  /** Return the number next to the border, on the accepted side. */
  function bisect(accepts, accepted, rejected) {
    for (let k = 0; k < 200; k++) {
      const middle = accepted + (rejected - accepted) / 2;
      if (middle === accepted || middle === rejected) break;
      if (accepts(middle)) accepted = middle;
      else rejected = middle;
    }
    return accepted;
  }

  /** Return delta(epsilon) = cdf(mu/2 - eps/mu) - e^eps cdf(-mu/2 - eps/mu). */
  function deltaFrom(mu, epsilon) {
    if (mu === 0 || epsilon === Infinity) return 0;
    if (mu === Infinity) return 1;
    const upper = mu / 2 - epsilon / mu;
    if (upper > 9) return 1;
    // The density of both terms is the same, so that e^eps, which overflows, never appears.
    const density = Math.exp((-upper * upper) / 2) / 2;
    const drop = erfcxDrop(epsilon / mu / Math.SQRT2, mu / (2 * Math.SQRT2));
    return Math.min(density * drop, 1);
  }

  /** Return erfcx(c - h) - erfcx(c + h), by quadrature where the difference would cancel. */
  function erfcxDrop(centre, half) {
    if (half >= 0.36) return erfcx(centre - half) - erfcx(centre + half);
    const nodes = [0.1834346424956498, 0.525532409916329, 0.7966664774136267, 0.9602898564975363];
    const weights = [0.362683783378362, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763];
    let sum = 0;
    for (let k = 0; k < 4; k++) {
      for (const z of [centre - half * nodes[k], centre + half * nodes[k]]) {
        sum += weights[k] * (2 / Math.sqrt(Math.PI) - 2 * z * erfcx(z));
      }
    }
    return half * sum;
  }

  /** Return the least epsilon with delta(epsilon) <= delta. */
  function epsilonFrom(mu, delta) {
    if (mu === 0 || delta >= 1) return 0;
    if (mu === Infinity || delta <= 0) return Infinity;
    if (deltaFrom(mu, 0) <= delta) return 0;
    let enough = 1;
    while (deltaFrom(mu, enough) > delta) enough *= 2;
    return bisect((epsilon) => deltaFrom(mu, epsilon) <= delta, enough, 0);
  }

  /** Return the largest mu that is (epsilon, delta)-DP. */
  function muFrom(epsilon, delta) {
    let tooMuch = 1;
    while (deltaFrom(tooMuch, epsilon) <= delta) tooMuch *= 2;
    return bisect((mu) => deltaFrom(mu, epsilon) <= delta, 0, tooMuch);
  }

  /** Return the share of true cases that the best attack finds at this rate of false alarms. */
  function power(mu, falseAlarms) {
    return mu === Infinity ? 1 : cdf(quantile(falseAlarms) + mu);
  }

  return { bisect, cdf, deltaFrom, epsilonFrom, erfcx, muFrom, power, quantile };
})();
