"""Six hospitals of one consortium file in Flower's simulation engine, with 9000 to 40 patients.

Run with ``python examples/flower_hospitals.py FOLDER``; it needs the extra ``flower`` and its
simulation engine (``pip install '.[flower]' 'flwr[simulation]'``). The consortium file is the only
configuration of data, model and promise. The model is in FOLDER/out afterwards, for
``corn export``, ``corn predict`` and ``corn report``.
"""

import logging
import runpy
import sys
import tempfile
from pathlib import Path

from corn.flower import make_client_app, train_consortium
from corn.learn import load_model, predict_table


def main() -> None:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    hospitals = runpy.run_path(str(Path(__file__).with_name("six_hospitals.py")))
    names = [str(partition) for partition in range(6)]
    consortium = hospitals["make_folders"](folder / "sites", names)
    server = ServerApp()

    @server.main()
    def serve(grid, _) -> None:
        train_consortium(grid, consortium, folder / "out")

    run_simulation(server, make_client_app(folder / "sites" / "{site}"), len(names))
    model = load_model(folder / "out")
    scores = predict_table(model, consortium.with_name("public.csv")).scores
    print(model.promise.describe())
    print(f"test accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
