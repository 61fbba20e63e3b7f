"""The node Preload Model: loads a model before its first use."""

from __future__ import annotations

import moored

from moored_griptape.run_node import RunNode


class MooredPreloadModel(RunNode):
    """Loads a model whole, so that the next run begins at once; hands its handle on."""

    async def _run(self, client: moored.AsyncClient) -> str:
        handle, constraints = self._handle, self._constraints

        async def load() -> moored.JobResult:
            await constraints.check_load(client, handle, self._shown.line)
            stream = client.stream_load(handle.named, **constraints.job_options)
            return await self._follow(stream)

        result = await self._with_model(client, handle, load)
        self._shown.done(result)
        self.parameter_output_values["model"] = handle.as_json()
        already = ", ".join(result.resident_already)
        was = f"; {already} had been in memory already" if already else ""
        return f"{result.model.key} is in memory, after {result.total_ms / 1000:.1f} s{was}"
