"""Six hospitals of one consortium file on NVFlare: the job has neither code nor settings.

Run with ``python examples/nvflare/consortium.py FOLDER``. It writes the folder ``local/corn`` of
each site and of the server to FOLDER/sites, and the job to FOLDER/job.
"""

import runpy
import sys
from pathlib import Path

from corn.nvflare import make_consortium_job

HOSPITALS = Path(__file__).parents[1] / "six_hospitals.py"


def main() -> None:
    """Make the folders of all parties, and the job."""
    folder = Path(sys.argv[1])
    sites = folder / "sites"
    hospitals = runpy.run_path(str(HOSPITALS))
    consortium = hospitals["make_folders"](sites, [f"site-{number + 1}" for number in range(6)])
    (sites / "server").mkdir()
    hospitals["copy_public_files"](sites, sites / "server")
    make_consortium_job(consortium, wait=60).export_job(str(folder / "job"))
    print(f"copy each folder of {sites} to local/corn of its party, and submit {folder}/job/corn")


if __name__ == "__main__":
    main()
