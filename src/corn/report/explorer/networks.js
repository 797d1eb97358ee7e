// Networks and objectives: Metropolis weights, and the matrix A of the noise energy Tr(A R).
corn.networks = (() => {
  "use strict";
  const { eigh, rebuild } = corn.matrices;

  /** Return the mixing matrix with weights 1 / (1 + max(d_i, d_j)) on links. */
  function metropolis(n, links) {
    const degrees = Array(n).fill(0);
    for (const [i, j] of links) (degrees[i]++, degrees[j]++);
    const W = new Float64Array(n * n);
    for (const [i, j] of links) {
      W[i * n + j] = W[j * n + i] = 1 / (1 + Math.max(degrees[i], degrees[j]));
    }
    for (let i = 0; i < n; i++) {
      let others = 0;
      for (let j = 0; j < n; j++) if (j !== i) others += W[i * n + j];
      W[i * n + i] = 1 - others;
    }
    return W;
  }

  /** Return the Laplacian of the links. */
  function laplacian(n, links) {
    const L = new Float64Array(n * n);
    for (const [i, j] of links) {
      L[i * n + j] = L[j * n + i] = -1;
      L[i * n + i]++;
      L[j * n + j]++;
    }
    return L;
  }

  function isConnected(n, links) {
    const reached = new Set([0]);
    for (let size = 0; size !== reached.size; ) {
      size = reached.size;
      for (const [i, j] of links) {
        if (reached.has(i) || reached.has(j)) reached.add(i).add(j);
      }
    }
    return reached.size === n;
  }

  /** Return the default horizon, weight of disagreement and momentum of a run of so many steps. */
  function defaultObjective(steps) {
    const momentum = Math.min(Math.max(1 - 6 / steps, 0), 0.97);
    return { length: Math.max(1, steps / 5), weight: 0.1, momentum };
  }

  function momentumGain(contraction, momentum) {
    const product = contraction * momentum;
    const share = (1 - momentum) / (1 + momentum);
    return (share * (1 - product * product)) / (1 - product) ** 2;
  }

  /** Return A of corn.Horizon for a connected network, whose W is symmetric. */
  function objectiveMatrix(W, n, { length, weight, momentum }) {
    const rho = Math.sqrt(1 - 1 / length);
    const { values, vectors } = eigh(W, n);
    const energies = values.map(
      (w) => ((w * w) / (1 - rho * rho * w * w)) * momentumGain(rho * w, momentum),
    );
    const A = rebuild(vectors, energies, n).map((entry) => weight * entry);
    // The energy of the average keeps its full weight.
    const average = ((1 - weight) * length * momentumGain(rho, momentum)) / n;
    return A.map((entry) => entry + average);
  }

  return { defaultObjective, isConnected, laplacian, metropolis, objectiveMatrix };
})();
