"""The training script of a site, as NVFlare's own examples write it: CorN does not appear in it."""

import nvflare.client as flare
import torch
from model import FEATURES, Net
from torch import nn

ROWS, EPOCHS = 400, 3


def load_site_data(site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one site; replace this by your own file."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    noise = 0.5 * torch.randn(ROWS, generator=generator)
    return inputs, (inputs.sum(1) + noise > 0).long()


def main() -> None:
    """Answer each model of the server with the model after some epochs on the site's own rows."""
    model = Net()
    flare.init()
    inputs, targets = load_site_data(flare.get_site_name())
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(
            {name: torch.as_tensor(value) for name, value in received.params.items()}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        flare.send(
            flare.FLModel(
                params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": EPOCHS * len(inputs)}
            )
        )


if __name__ == "__main__":
    main()
