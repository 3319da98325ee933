"""The transport for clusters: Gloo between pairs of processes. Read `transport` first."""

from gossamer.real.transports.torch.transport import TorchTransport

__all__ = ["TorchTransport"]
