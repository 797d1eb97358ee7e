// Designs of the noise for the cap [R^-1]_ii <= 1: LDP, DECOR, and CorN against an eavesdropper.
//
// A split of the noise has private variances, and seed groups whose members share streams:
// {theta, groups: [{members, factor}]}, where factor[a] has the weights of member a on the streams.
corn.designs = (() => {
  "use strict";
  const { diagonal, dot, eigh, invert, rebuild, solve } = corn.matrices;
  const MOST_VARIANCE = 32 ** 2; // of an agent's noise, in units of its LDP variance
  const TOLERANCE = 1e-6;

  /** Return independent noise, the strongest that any agent needs alone. */
  function ldp(n) {
    return { theta: new Float64Array(n).fill(1), groups: [] };
  }

  /** Return the best noise sigma^2 I + tau^2 L: the ratio is searched, the scale follows. */
  function decor(A, L, n, links) {
    const { values, vectors } = eigh(L, n);
    const traces = [trace(A, n), dot(A, L)];
    const scaleOf = (ratio) => {
      let worst = 0;
      for (let i = 0; i < n; i++) {
        let sum = 0;
        for (let k = 0; k < n; k++) {
          sum += vectors[i * n + k] ** 2 / (1 + ratio * Math.max(values[k], 0));
        }
        worst = Math.max(worst, sum);
      }
      return worst;
    };
    const degrees = diagonal(L, n);
    const valueOf = (ratio) => {
      const scale = scaleOf(ratio);
      if (scale * (1 + ratio * Math.max(...degrees)) > MOST_VARIANCE) return Infinity;
      return scale * (traces[0] + ratio * traces[1]);
    };
    const ratio = searchRatio(valueOf);
    const scale = scaleOf(ratio);
    const strength = Math.sqrt(scale * ratio);
    return {
      theta: new Float64Array(n).fill(scale),
      groups: links.map((members) => ({ members, factor: [[strength], [-strength]] })),
    };
  }

  /** Look everywhere first, because there can be several minima, then zoom in on the best. */
  function searchRatio(valueOf) {
    let grid = spread(-18, 18, 145);
    for (let zoom = 0; zoom < 8; zoom++) {
      const best = argmin(grid.map((x) => valueOf(Math.exp(x))));
      const [low, high] = [grid[Math.max(best - 1, 0)], grid[Math.min(best + 1, grid.length - 1)]];
      grid = spread(low, high, 21);
    }
    const ratios = [...grid.map(Math.exp), 0];
    return ratios[argmin(ratios.map(valueOf))];
  }

  function spread(low, high, count) {
    return Array.from({ length: count }, (_, k) => low + ((high - low) * k) / (count - 1));
  }

  function argmin(values) {
    return values.reduce((best, value, k) => (value < values[best] ? k : best), 0);
  }

  /** Return CorN's noise against an eavesdropper: one seed for all, solved by the exact dual. */
  function corn_(A, n) {
    const R = scaleToCap(recover(A, n), n);
    const { values, vectors } = eigh(R, n);
    // As much as possible is private noise, which no insider can subtract.
    const least = Math.max(values[0], 0);
    const factor = Array.from({ length: n }, (_, i) =>
      Array.from(values, (value, k) => vectors[i * n + k] * Math.sqrt(Math.max(value - least, 0))),
    );
    const members = [...Array(n).keys()];
    return { theta: new Float64Array(n).fill(least), groups: [{ members, factor }] };
  }

  function scaleToCap(R, n) {
    const worst = Math.max(...diagonal(invert(R, n), n));
    return R.map((entry) => entry * worst);
  }

  /** Return the covariance of the dual's solution, within the limit on noise. */
  function recover(A, n) {
    const solution = solveDual(A, n, TOLERANCE, 100);
    let { R, limited } = limitNoise(precisionOf(solution.point, n), n);
    if (!limited || dot(A, R) <= 1.001 * solution.bound) return R;
    // A is nearly singular. The least ridge that keeps the noise within its limit does better.
    let [low, high] = [-8, 3];
    let start = solution.point.multipliers;
    for (let k = 0; k < 10; k++) {
      const middle = (low + high) / 2;
      const ridged = Float64Array.from(A);
      for (let i = 0; i < n; i++) ridged[i * n + i] += (10 ** middle * trace(A, n)) / n;
      const warm = solveDual(ridged, n, 1e-4, 100, start);
      start = warm.point.multipliers;
      const candidate = limitNoise(precisionOf(warm.point, n), n);
      if (candidate.limited) low = middle;
      else high = middle;
      if (dot(A, candidate.R) < dot(A, R)) R = candidate.R;
    }
    return R;
  }

  /** Maximise the dual bound over multipliers by Newton's method; one eigendecomposition each. */
  function solveDual(A, n, tolerance, maxIterations, start) {
    let trial = start ?? new Float64Array(n).fill(1);
    let [base, baseBound, baseGap, step] = [trial, 0, Infinity, new Float64Array(n)];
    let [best, bound, bestValue] = [null, 0, Infinity];
    for (let iteration = 0; iteration < maxIterations; iteration++) {
      const point = evaluate(A, n, trial);
      bound = Math.max(bound, point.bound);
      const gap = point.value / point.bound - 1;
      let value = point.value;
      if (gap > tolerance && gap <= 3 * Math.sqrt(tolerance)) value = attainedValue(A, point, n);
      if (value < bestValue) [best, bestValue] = [point, value];
      if (bestValue <= (1 + tolerance) * bound) break;
      if (point.bound < baseBound && gap > baseGap) {
        step = step.map((x) => x / 4);
      } else {
        [base, baseBound, baseGap] = [point.multipliers, point.bound, gap];
        step = newtonStep(point, n);
      }
      trial = move(base, step, 0.1 * tolerance);
    }
    return { point: best, bound, value: bestValue };
  }

  function evaluate(A, n, multipliers) {
    const d = multipliers.map(Math.sqrt);
    const M = A.map((entry, k) => entry * d[Math.floor(k / n)] * d[k % n]);
    const { values, vectors } = eigh(M, n);
    // Lowered by the rounding error, so that the bound stays a bound.
    const rounding = n * 2.3e-16 * values[n - 1];
    const s = values.map((mu) => Math.sqrt(Math.max(mu - rounding, 0)));
    const scale = sum(s) / sum(multipliers);
    const roots = s.map((x) => x * scale);
    const lambda = multipliers.map((x) => x * scale * scale);
    const S = Float64Array.from({ length: n }, (_, i) => {
      let entry = 0;
      for (let k = 0; k < n; k++) entry += vectors[i * n + k] ** 2 * roots[k];
      return entry;
    });
    const bound = sum(roots);
    const value = bound * Math.max(...S.map((x, i) => x / lambda[i]));
    return { multipliers: lambda, roots, vectors, S, bound, value };
  }

  /** Return R^-1 of a point, with every diagonal entry raised to the cap of 1. */
  function precisionOf(point, n) {
    const S = rebuild(point.vectors, point.roots, n);
    const d = point.multipliers.map(Math.sqrt);
    const Y = S.map((entry, k) => entry / (d[Math.floor(k / n)] * d[k % n]));
    const largest = Math.max(...diagonal(Y, n));
    return Y.map((entry, k) => (k % (n + 1) === 0 ? 1 : entry / largest));
  }

  function attainedValue(A, point, n) {
    const R = invert(precisionOf(point, n), n);
    if (!R || Math.max(...diagonal(R, n)) > 1e8) return point.value;
    return Math.min(point.value, dot(A, R));
  }

  function newtonStep({ multipliers, roots, vectors, S }, n) {
    const residual = S.map((s, i) => {
      const lambda = multipliers[i];
      return lambda < s ? s * Math.log(s / lambda) : s - lambda;
    });
    const P = curvature(vectors, roots, n);
    for (const damping of [1e-6, 1e-3, 1]) {
      const damped = Float64Array.from(P);
      for (let i = 0; i < n; i++) {
        damped[i * n + i] += Math.max(multipliers[i] - S[i], 0) + damping * multipliers[i];
      }
      const step = solve(damped, residual, n);
      if (step) return step;
    }
    return residual.map((x, i) => x / multipliers[i]);
  }

  /** Return P_ij = sum_kl Q_ik Q_il Q_jk Q_jl s_k s_l / (s_k + s_l), written out. */
  function curvature(Q, s, n) {
    const P = new Float64Array(n * n);
    for (let k = 0; k < n; k++) {
      for (let l = 0; l <= k; l++) {
        const weight = (s[k] * s[l]) / (s[k] + s[l]) || 0;
        const both = weight * (k === l ? 1 : 2);
        const column = Float64Array.from({ length: n }, (_, i) => Q[i * n + k] * Q[i * n + l]);
        for (let i = 0; i < n; i++) {
          for (let j = 0; j <= i; j++) P[i * n + j] += both * column[i] * column[j];
        }
      }
    }
    for (let i = 0; i < n; i++) for (let j = 0; j < i; j++) P[j * n + i] = P[i * n + j];
    return P;
  }

  function move(multipliers, step, smallestShare) {
    const moved = multipliers.map((lambda, i) => {
      const factor = step[i] > 0 ? Math.exp(Math.min(step[i], Math.log(20))) : 1 + step[i];
      return lambda * Math.max(factor, 0.02);
    });
    const least = (smallestShare * sum(moved)) / moved.length;
    return moved.map((x) => Math.max(x, least));
  }

  /** Return the inverse of Y, blended with I until no agent's noise exceeds the limit. */
  function limitNoise(Y, n) {
    const R = invert(Y, n);
    if (R && Math.max(...diagonal(R, n)) <= MOST_VARIANCE) return { R, limited: false };
    const { values, vectors } = eigh(Y, n);
    const inverses = (t) => values.map((x) => 1 / ((1 - t) * Math.max(x, 0) + t));
    const fits = (t) => {
      const inverse = inverses(t);
      for (let i = 0; i < n; i++) {
        let variance = 0;
        for (let k = 0; k < n; k++) variance += vectors[i * n + k] ** 2 * inverse[k];
        if (variance > MOST_VARIANCE) return false;
      }
      return true;
    };
    let [low, high] = [Math.log(1e-12), 0];
    for (let k = 0; k < 60; k++) {
      const middle = (low + high) / 2;
      if (fits(Math.exp(middle))) high = middle;
      else low = middle;
    }
    return { R: rebuild(vectors, inverses(Math.exp(high)), n), limited: true };
  }

  /** Return the covariance of the noise that a coalition cannot reproduce. */
  function hiddenFrom({ theta, groups }, coalition = []) {
    const n = theta.length;
    const known = new Set(coalition);
    const R = new Float64Array(n * n);
    theta.forEach((variance, i) => (R[i * n + i] = variance));
    for (const { members, factor } of groups) {
      if (members.some((agent) => known.has(agent))) continue;
      members.forEach((i, a) =>
        members.forEach((j, b) => (R[i * n + j] += dot(factor[a], factor[b]))),
      );
    }
    return R;
  }

  /** Return [R^-1]_ii of each agent against a coalition; null for its members. */
  function hiddenPrecision(split, coalition = []) {
    const n = split.theta.length;
    const honest = [...Array(n).keys()].filter((i) => !coalition.includes(i));
    const R = hiddenFrom(split, coalition);
    const m = honest.length;
    const block = Float64Array.from({ length: m * m }, (_, k) => {
      return R[honest[Math.floor(k / m)] * n + honest[k % m]];
    });
    const Y = invert(block, m);
    const precisions = Array(n).fill(null);
    // Singular noise hides nothing.
    honest.forEach((agent, a) => (precisions[agent] = Y ? Y[a * m + a] : Infinity));
    return precisions;
  }

  /** Return the noise variance of the average over that of a trusted server. */
  function centralRatio(split) {
    return sum(hiddenFrom(split));
  }

  function trace(A, n) {
    return sum(diagonal(A, n));
  }

  function sum(values) {
    return values.reduce((total, value) => total + value, 0);
  }

  return { centralRatio, corn: corn_, decor, hiddenFrom, hiddenPrecision, ldp, solveDual };
})();
