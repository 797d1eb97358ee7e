"""A private FedAvg job of NVFlare: in its simulator, or as a folder to submit.

python examples/nvflare/job.py --simulate        # six sites in one process
python examples/nvflare/job.py --job DIR         # the job; each site has its own filter
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

import corn
from corn.distributed import make_keys
from corn.noise import load_roster
from corn.nvflare import CornFilter, CornSums

SITES, ROUNDS = 6, 5
BUDGET = corn.PrivacyBudget(epsilon=8, delta=1e-5, num_steps=ROUNDS, clip=1.0)


def make_folders(folder: Path, budget: corn.PrivacyBudget = BUDGET) -> list[str]:
    """Make one plan, and a folder with a key for each site; return the public keys."""
    plan = corn.make_plan(corn.load_network(f"star:{SITES}"), budget)
    print(plan.describe())
    # At real sites everybody makes a key with corn keys make, and only public keys travel.
    make_keys(folder / "all", SITES)
    for number in range(SITES):
        own, key = folder / f"site-{number + 1}", f"agent-{number}.key"
        own.mkdir(mode=0o700)
        corn.save_plan(plan, own / "plan.corn")
        (folder / "all" / key).rename(own / key)
        shutil.copy(folder / "all" / "roster.json", own)
    roster = load_roster(folder / "all" / "roster.json")
    return [key.hex() for key in roster.public_keys]


def read_options(description: str | None) -> argparse.Namespace:
    """Return what to do with the job."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--job", type=Path)
    parser.add_argument("--sites", type=Path, help="a new folder; by default a temporary one")
    options = parser.parse_args()
    # New at each run: a plan and its keys are those of one job.
    options.sites = options.sites or Path(tempfile.mkdtemp(prefix="corn-sites-"))
    print(f"plan and key of each site: {options.sites}")
    return options


def main() -> None:
    """Run or export the job."""
    options = read_options(__doc__)
    recipe = FedAvgRecipe(
        name="corn",
        model=Net(),
        min_clients=SITES,
        num_rounds=ROUNDS,
        train_script=str(Path(__file__).with_name("train.py")),
    )
    keys = make_folders(options.sites)
    job = recipe._job  # a recipe has no other way to leave a package out of the job
    # Sites use the CorN that they installed. NVFlare would copy its source into the job.
    job.set_app_packages(["corn"])
    job.to_server(CornSums(keys, wait=60), id="corn_sums")
    if options.simulate:
        own = CornFilter(str(options.sites.resolve() / "{site}"))
        recipe.add_client_input_filter(own, tasks=["train"])
        recipe.add_client_output_filter(own, tasks=["train"])
    if options.job:
        recipe.export(str(options.job))
    else:
        print(recipe.execute(SimEnv(num_clients=SITES)).get_result())


if __name__ == "__main__":
    main()
