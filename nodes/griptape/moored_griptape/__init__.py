"""Nodes of Griptape Nodes for moored: the service generates, they forward, show and cancel."""
