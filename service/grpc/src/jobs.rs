//! `moored.v1.Jobs`.

use api::v1;
use api::v1::jobs_server;
use calls::{Jobs, ListedJob, millis};
use tonic::{Request, Response, Status};

use crate::convert::job_out;
use crate::events::{EventStream, events_of};
use crate::requests::{asked, caller_of};
use crate::status::status_of;

/// The calls of `moored.v1.Jobs`.
pub(crate) struct JobsService(pub(crate) Jobs);

#[tonic::async_trait]
impl jobs_server::Jobs for JobsService {
    async fn list(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let jobs = self.0.list(asked(request)?.include_ended).await;
        Ok(Response::new(v1::ListJobsResponse {
            jobs: jobs.iter().map(listed_out).collect(),
        }))
    }

    type FetchStream = EventStream;

    async fn fetch(&self, request: Request<v1::FetchJobRequest>) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.fetch(&asked(request)?.job_id, &caller))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelJobRequest>,
    ) -> Result<Response<v1::CancelJobResponse>, Status> {
        let caller = caller_of(&request);
        let v1::CancelJobRequest {
            job_id,
            client_id,
            release_latents,
            ..
        } = asked(request)?;
        let cancelled = self.0.cancel(&job_id, client_id, release_latents, &caller).await;
        let cancelled = cancelled.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::CancelJobResponse { cancelled }))
    }
}

fn listed_out(job: &ListedJob) -> v1::JobInfo {
    v1::JobInfo {
        results_for_ms: job.end.map(|end| millis(end.results_for)),
        ..job_out(&job.info)
    }
}
