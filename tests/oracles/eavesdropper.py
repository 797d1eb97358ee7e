"""Values of Tr(A R) at b = 1 with Metropolis weights, computed independently of this package."""

from typing import NamedTuple

import networkx as nx


class Oracle(NamedTuple):
    graph: nx.Graph
    horizon: float
    ldp: float
    decor: float
    corn: float


ORACLES = {
    f"{name}-{horizon}": Oracle(graph, horizon, *values)
    for name, graph, one_step, thousand in (
        (
            "cycle20",
            nx.cycle_graph(20),
            (6.666667, 4.96904, 4.6025201),
            (1038.843, 123.8382, 118.3157),
        ),
        (
            "path10",
            nx.path_graph(10),
            (3.777778, 3.497474, 2.7326106),
            (1019.359, 186.8333, 163.17948),
        ),
        (
            "star20",
            nx.star_graph(19),
            (17.245, 17.21037, 17.194423),
            (1165.087, 383.2964, 383.25913),
        ),
        (
            "grid4x5",
            nx.grid_2d_graph(4, 5),
            (5.25, 4.972454, 3.6181892),
            (1012.603, 105.4253, 91.316469),
        ),
        (
            "hypercube16",
            nx.hypercube_graph(4),
            (3.2, 2.722145, 2.25),
            (1003.228, 92.55587, 87.482917),
        ),
        (
            "petersen",
            nx.petersen_graph(),
            (2.5, 2.029093, 2.025),
            (1001.933, 126.3493, 126.32201),
        ),
        (
            "karate",
            nx.karate_club_graph(),
            (14.70328, 14.70328, 13.119145),
            (1064.523, 236.352, 151.34009),
        ),
        (
            "tree31",
            nx.balanced_tree(2, 4),
            (13.875, 13.38128, 11.755734),
            (1126.525, 214.4047, 185.20459),
        ),
    )
    for horizon, values in ((1, one_step), (1000, thousand))
}
