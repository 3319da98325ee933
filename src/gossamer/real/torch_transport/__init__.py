"""The transport for clusters: Gloo point to point, under torchrun or our own launcher."""

from gossamer.real.torch_transport.transport import TorchTransport

__all__ = ["TorchTransport"]
