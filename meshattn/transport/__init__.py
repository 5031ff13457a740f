"""Chunk transfers between the ranks of a mesh."""

from meshattn.transport.base import Handle, Message, Traffic, TrafficRecord, Transport, TransportError

__all__ = ["Handle", "Message", "Traffic", "TrafficRecord", "Transport", "TransportError"]
