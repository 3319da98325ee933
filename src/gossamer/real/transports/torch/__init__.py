"""The transport for clusters: Gloo point to point, under torchrun or our own launcher."""

from gossamer.real.transports.torch.transport import TorchTransport

__all__ = ["TorchTransport"]
