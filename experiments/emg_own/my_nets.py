"""A network of one's own: a 1-D CNN for signals."""

from torch import Tensor, nn


class HarNet(nn.Module):
    """Two convolutions over time, their mean in four parts of the window, two dense layers; (n, channels, length) ->
    (n, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16, kernel: int = 5) -> None:
        super().__init__()
        self.first = nn.Conv1d(shape[0], width, kernel, padding=kernel // 2)
        self.second = nn.Conv1d(width, 2 * width, kernel, padding=kernel // 2)
        self.pool, self.act = nn.MaxPool1d(2), nn.ReLU()
        self.mean = nn.AvgPool1d(shape[1] // 2 // 4)
        self.dense = nn.Linear(8 * width, 2 * width)
        self.last = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.pool(self.first(x)))  # (n, width, length / 2)
        x = self.mean(self.act(self.second(x))).flatten(1)  # (n, 2 width x 4)
        return self.last(self.act(self.dense(x)))
