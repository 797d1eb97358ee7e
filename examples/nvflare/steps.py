"""Private gradient steps on NVFlare, for a budget that protects each row (unit sample).

python examples/nvflare/steps.py --simulate
python examples/nvflare/steps.py --job DIR
"""

from pathlib import Path

import job
import torch
from model import Net
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.recipe import SimEnv
from torch import nn
from train import ROWS, load_site_data

import corn
from corn.nvflare import CornExecutor, CornSums

ROUNDS, STEPS = 3, 10


def make_problem(site: str) -> tuple[nn.Module, object, torch.utils.data.TensorDataset]:
    """Return model, loss and data of a site."""
    return Net(), nn.functional.cross_entropy, torch.utils.data.TensorDataset(*load_site_data(site))


def main() -> None:
    """Run or export the job."""
    options = job.read_options(__doc__)
    budget = corn.PrivacyBudget(
        epsilon=2,
        delta=1e-5,
        num_steps=ROUNDS * STEPS,
        clip=1.0,
        unit="sample",
        batch_size=40,
        samples_per_agent=ROWS,
    )
    keys = job.make_folders(options.sites, budget)
    folder = str(options.sites.resolve() / "{site}") if options.simulate else ""
    fed_job = BaseFedJob(initial_model=Net(), name="corn_steps", min_clients=job.SITES)
    fed_job.set_app_packages(["corn"])
    fed_job.to_server(FedAvg(num_clients=job.SITES, num_rounds=ROUNDS))
    fed_job.to_server(CornSums(keys, wait=60), id="corn_sums")
    executor = CornExecutor("steps.make_problem", step_size=1.0, steps=STEPS, folder=folder)
    fed_job.to_clients(executor, tasks=["train"])
    fed_job.to_clients(str(Path(__file__)))
    if options.job:
        fed_job.export_job(str(options.job))
    else:
        SimEnv(num_clients=job.SITES).deploy(fed_job)


if __name__ == "__main__":
    main()
