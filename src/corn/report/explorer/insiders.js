// CorN's noise against insiders: private noise for each agent, and one stream for each pair.
//
// Minimises log Tr(A R) + (1/p) log sum pi x^p over all coalitions, as corn.covariance.LowRank
// does, with one inverse for each coalition. The bound is proved by the weights of the same sum.
corn.insiders = (() => {
  "use strict";
  const { diagonal, invert } = corn.matrices;
  const SHARPNESS = [10, 30, 60];
  const ITERATIONS = 50;
  const MOST_VARIANCE = 32 ** 2;

  function* combinations(n, q, first = 0) {
    if (q === 0) yield [];
    for (let i = first; q > 0 && i < n; i++) {
      for (const rest of combinations(n, q - 1, i + 1)) yield [i, ...rest];
    }
  }

  /**
   * Return {split, gap, evaluations} for coalitions of q insiders, with seeds of all pairs.
   *
   * `watch(evaluations, gap)` is called after each round.
   */
  function design(A, n, q, { tolerance = 1e-3, maxEvaluations = 3000, watch = () => {} } = {}) {
    let ridge = isSingularOnPair(A, n) ? 1e-6 : 0;
    for (;;) {
      const search = new Search(A, n, q, ridge);
      const found = search.run(tolerance, maxEvaluations, watch);
      const largest = Math.max(...diagonal(search.covariance(found.theta, found.factors), n));
      if (found.largest * largest <= MOST_VARIANCE) return search.conclude(found);
      ridge = Math.max(10 * ridge, 1e-6);
    }
  }

  function isSingularOnPair(A, n) {
    for (const [i, j] of combinations(n, 2)) {
      const { low, high } = eigenvalues(A[i * n + i], A[i * n + j], A[j * n + j]);
      if (low <= 1e-12 * high) return true;
    }
    return false;
  }

  /** Return the eigenvalues of the matrix [[a, b], [b, c]]. */
  function eigenvalues(a, b, c) {
    const mean = (a + c) / 2;
    const radius = Math.hypot((a - c) / 2, b);
    return { low: mean - radius, high: mean + radius };
  }

  class Search {
    constructor(A, n, q, ridge) {
      this.n = n;
      this.trueA = A;
      this.A = Float64Array.from(A);
      const mean = diagonal(A, n).reduce((a, b) => a + b, 0) / n;
      for (let i = 0; i < n; i++) this.A[i * n + i] += ridge * mean;
      this.pairs = [...combinations(n, 2)];
      this.coalitions = [...combinations(n, q)];
      this.touched = this.coalitions.map((coalition) =>
        this.pairs.flatMap(([i, j], e) =>
          coalition.includes(i) || coalition.includes(j) ? [e] : [],
        ),
      );
      this.isMember = this.coalitions.map((coalition) => {
        const members = new Uint8Array(n);
        for (const agent of coalition) members[agent] = 1;
        return members;
      });
      this.logPrior = new Float64Array(this.coalitions.length * n);
      this.metrics = this.pairs.map(([i, j]) => this.scalePair(i, j));
      this.evaluations = 0;
      this.best = null;
      this.bound = this.trueBound = 0;
    }

    /** Return A^(-1/4) of a pair, in whose coordinates the problem is well-conditioned. */
    scalePair(i, j) {
      const { n, A } = this;
      const [a, b, c] = [A[i * n + i], A[i * n + j], A[j * n + j]];
      const { low, high } = eigenvalues(a, b, c);
      const root = (x) => Math.max(x / high, 1e-8) ** -0.25;
      const [u, v] = [root(low), root(high)];
      // f(M) = v I + (u - v)/(low - high) (M - high I) for a matrix of two eigenvalues.
      const slope = low === high ? 0 : (u - v) / (low - high);
      return [v + slope * (a - high), slope * b, v + slope * (c - high)];
    }

    run(tolerance, maxEvaluations, watch) {
      const { n, pairs } = this;
      const strength = 1 / Math.sqrt(n - 1);
      let z = this.pack(
        new Float64Array(n).fill(1),
        pairs.map(() => [strength, -strength]),
      );
      for (let round = 0; ; round++) {
        const sharpness = SHARPNESS[Math.min(round, SHARPNESS.length - 1)];
        z = corn.minimise((x) => this.objective(x, sharpness), z, ITERATIONS);
        const point = this.evaluate(z, sharpness);
        this.bound = Math.max(this.bound, this.boundBy(point, this.A));
        this.trueBound = Math.max(this.trueBound, this.boundBy(point, this.trueA));
        const gap = this.best.value / this.bound - 1;
        watch(this.evaluations, gap);
        const isSharp = round >= SHARPNESS.length - 1;
        if (gap <= tolerance || this.evaluations >= maxEvaluations) return this.best;
        if (isSharp) this.updatePrior(point);
        z = this.revive(point);
      }
    }

    conclude({ theta, factors, largest, value }) {
      const groups = this.pairs.map((members, e) => ({
        members,
        factor: factors[e].map((weight) => [weight * Math.sqrt(largest)]),
      }));
      const split = { theta: theta.map((variance) => variance * largest), groups };
      const energy = corn.matrices.dot(this.trueA, corn.designs.hiddenFrom(split));
      const gap = this.trueBound > 0 ? energy / this.trueBound - 1 : Infinity;
      return { split, gap, searchGap: value / this.bound - 1, evaluations: this.evaluations };
    }

    covariance(theta, factors) {
      const { n, pairs } = this;
      const R = new Float64Array(n * n);
      for (let i = 0; i < n; i++) R[i * n + i] = theta[i];
      for (let e = 0; e < pairs.length; e++) this.addPair(R, e, factors[e], 1);
      return R;
    }

    addPair(R, e, [f, g], sign) {
      const { n } = this;
      const [i, j] = this.pairs[e];
      R[i * n + i] += sign * f * f;
      R[j * n + j] += sign * g * g;
      R[i * n + j] += sign * f * g;
      R[j * n + i] += sign * f * g;
    }

    objective(z, sharpness) {
      const point = this.evaluate(z, sharpness);
      if (!point) return { value: 1e10, gradient: new Float64Array(z.length) };
      return { value: Math.log(point.trace) + point.smooth, gradient: this.gradient(point) };
    }

    evaluate(z, sharpness) {
      this.evaluations++;
      const { n, A } = this;
      const { theta, factors } = this.unpack(z);
      const R = this.covariance(theta, factors);
      const inverses = [];
      const x = new Float64Array(this.logPrior.length);
      let top = -Infinity;
      let largest = 0;
      for (let c = 0; c < this.coalitions.length; c++) {
        const hidden = R.slice();
        for (const e of this.touched[c]) this.addPair(hidden, e, factors[e], -1);
        const M = invert(hidden, n);
        if (!M) return null;
        inverses.push(M);
        for (let i = 0; i < n; i++) {
          x[c * n + i] = M[i * n + i];
          if (this.isMember[c][i]) continue;
          largest = Math.max(largest, M[i * n + i]);
          top = Math.max(top, sharpness * Math.log(M[i * n + i]) + this.logPrior[c * n + i]);
        }
      }
      const point = { theta, factors, x, largest, ...this.press(inverses, x, sharpness, top) };
      point.trace = corn.matrices.dot(A, R);
      point.value = point.trace * largest;
      if (!this.best || point.value < this.best.value) this.best = point;
      return point;
    }

    /** Sum M Lambda M over coalitions, for private noise and for the pairs they do not know. */
    press(inverses, x, sharpness, top) {
      const { n, pairs } = this;
      const total = new Float64Array(n * n);
      const known = pairs.map(() => [0, 0, 0]);
      const weights = new Float64Array(x.length);
      let [mass, mean] = [0, 0];
      inverses.forEach((M, c) => {
        const lambda = new Float64Array(n);
        for (let i = 0; i < n; i++) {
          if (this.isMember[c][i]) continue;
          const k = c * n + i;
          weights[k] = Math.exp(sharpness * Math.log(x[k]) + this.logPrior[k] - top);
          mass += weights[k];
          mean += weights[k] * x[k];
          lambda[i] = weights[k] / x[k];
        }
        const G = sandwich(M, lambda, n);
        for (let k = 0; k < G.length; k++) total[k] += G[k];
        for (const e of this.touched[c]) {
          const [i, j] = pairs[e];
          known[e][0] += G[i * n + i];
          known[e][1] += G[j * n + i];
          known[e][2] += G[j * n + j];
        }
      });
      const blocks = pairs.map(([i, j], e) => [
        (total[i * n + i] - known[e][0]) / mass,
        (total[j * n + i] - known[e][1]) / mass,
        (total[j * n + j] - known[e][2]) / mass,
      ]);
      return {
        smooth: (top + Math.log(mass)) / sharpness,
        mean: mean / mass,
        weights: weights.map((w) => w / mass),
        privatePressure: diagonal(total, n).map((entry) => entry / mass),
        blocks,
      };
    }

    gradient({ theta, factors, trace, privatePressure, blocks }) {
      const { n, A, pairs, metrics } = this;
      const gradient = new Float64Array(n + 2 * pairs.length);
      for (let i = 0; i < n; i++) {
        gradient[i] = (A[i * n + i] / trace - privatePressure[i]) * theta[i];
      }
      for (let e = 0; e < pairs.length; e++) {
        const [a, b, c] = this.slack(e, trace, blocks);
        const [f, g] = factors[e];
        const [u, v] = [2 * (a * f + b * g), 2 * (b * f + c * g)];
        const [p, q, r] = metrics[e];
        gradient[n + 2 * e] = p * u + q * v;
        gradient[n + 2 * e + 1] = q * u + r * v;
      }
      return gradient;
    }

    /** Return A/Tr(A R) minus the pressure on a pair; a negative direction would help. */
    slack(e, trace, blocks) {
      const { n, A } = this;
      const [i, j] = this.pairs[e];
      const [a, b, c] = blocks[e];
      return [A[i * n + i] / trace - a, A[i * n + j] / trace - b, A[j * n + j] / trace - c];
    }

    /** Return the lower bound on Tr(A R) that the weights prove; 0 if A is singular on a pair. */
    boundBy({ mean, privatePressure, blocks }, A) {
      const { n, pairs } = this;
      let most = 0;
      for (let i = 0; i < n; i++) most = Math.max(most, privatePressure[i] / A[i * n + i]);
      for (let e = 0; e < pairs.length; e++) {
        const [i, j] = pairs[e];
        const [a, b, c] = [A[i * n + i], A[i * n + j], A[j * n + j]];
        const det = a * c - b * b;
        if (!(det > 1e-13 * a * c)) return 0;
        // The largest eigenvalue of A^-1 P is half its trace plus a root.
        const [p, q, r] = blocks[e];
        const half = (c * p - 2 * b * q + a * r) / det / 2;
        const product = (p * r - q * q) / det;
        most = Math.max(most, half + Math.sqrt(Math.max(half * half - product, 0)));
      }
      return mean / most;
    }

    updatePrior({ weights }) {
      this.logPrior = weights.map((weight) => Math.max(Math.log(weight), -40));
    }

    /** Return the point with a little noise where more would help but none is left. */
    revive({ theta, factors, trace, privatePressure, blocks }) {
      const { n, A } = this;
      const size = (1e-3 * theta.reduce((a, b) => a + b, 0)) / n;
      const revived = theta.map((variance, i) =>
        privatePressure[i] > A[i * n + i] / trace ? Math.max(variance, size) : variance,
      );
      const grown = factors.map(([f, g], e) => {
        const [a, b, c] = this.slack(e, trace, blocks);
        const { low } = eigenvalues(a, b, c);
        if (low >= 0 || f * f + g * g >= size) return [f, g];
        // The eigenvector of the negative eigenvalue.
        const [u, v] = Math.abs(a - low) > Math.abs(c - low) ? [-b, a - low] : [c - low, -b];
        const norm = Math.hypot(u, v) || 1;
        return [(Math.sqrt(size) * u) / norm, (Math.sqrt(size) * v) / norm];
      });
      return this.pack(revived, grown);
    }

    pack(theta, factors) {
      const z = new Float64Array(this.n + 2 * factors.length);
      theta.forEach((variance, i) => (z[i] = Math.log(variance)));
      factors.forEach(([f, g], e) => {
        const [p, q, r] = this.metrics[e];
        const det = p * r - q * q;
        z[this.n + 2 * e] = (r * f - q * g) / det;
        z[this.n + 2 * e + 1] = (p * g - q * f) / det;
      });
      return z;
    }

    unpack(z) {
      const theta = z.slice(0, this.n).map(Math.exp);
      const factors = this.metrics.map(([p, q, r], e) => {
        const [u, v] = [z[this.n + 2 * e], z[this.n + 2 * e + 1]];
        return [p * u + q * v, q * u + r * v];
      });
      return { theta, factors };
    }
  }

  /** Return the lower triangle of M diag(lambda) M. */
  function sandwich(M, lambda, n) {
    const scaled = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      for (let k = 0; k < n; k++) scaled[i * n + k] = M[i * n + k] * lambda[k];
    }
    const G = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j <= i; j++) {
        let entry = 0;
        for (let k = 0; k < n; k++) entry += scaled[i * n + k] * M[j * n + k];
        G[i * n + j] = entry;
      }
    }
    return G;
  }

  return { combinations, design };
})();
