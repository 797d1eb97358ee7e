// The slow computations of the page, run in a worker so that the page stays responsive.
corn.tasks = (() => {
  "use strict";
  const { designs, insiders, networks, promises } = corn;
  // As corn.covariance does, 24 agents and more get a gap of 1 %, or what 500 evaluations reach.
  const SMALL = { tolerance: 1e-3, maxEvaluations: 3000 };
  const LARGE = { tolerance: 1e-2, maxEvaluations: 500 };

  function objectiveOf({ agents, links, objective }) {
    return networks.objectiveMatrix(networks.metropolis(agents, links), agents, objective);
  }

  const tasks = {
    /** Design the noise of LDP, DECOR and CorN against an eavesdropper. */
    outsiders(settings) {
      const { agents, links } = settings;
      const A = objectiveOf(settings);
      return {
        ldp: designs.ldp(agents),
        decor: designs.decor(A, networks.laplacian(agents, links), agents, links),
        corn: designs.corn(A, agents),
      };
    },

    /** Design CorN's noise against so many insiders. */
    insiders(settings, watch) {
      const { agents, colluders } = settings;
      const effort = agents < 24 ? SMALL : LARGE;
      const A = objectiveOf(settings);
      const found = insiders.design(A, agents, colluders, { ...effort, watch });
      return { split: found.split, gap: found.gap };
    },

    cap({ promise }) {
      return promises.precisionCap(promise);
    },

    /** Return epsilon of each precision, equal ones computed once; null stays null. */
    epsilons({ promise, precisions }) {
      const known = new Map();
      return precisions.map((precision) => {
        if (precision === null) return null;
        const key = precision.toPrecision(7);
        if (!known.has(key)) known.set(key, promises.epsilonOf(precision, promise));
        return known.get(key);
      });
    },

    power({ promise, precision, falseAlarms }) {
      return promises.powerOf(precision, promise, falseAlarms);
    },
  };

  function answerMessages() {
    self.onmessage = ({ data: { id, name, settings } }) => {
      const watch = (evaluations, gap) => self.postMessage({ id, evaluations, gap });
      self.postMessage({ id, result: tasks[name](settings, watch) });
    };
  }

  return { ...tasks, answerMessages };
})();
