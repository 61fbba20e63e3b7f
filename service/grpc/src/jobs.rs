//! `moored.v1.Jobs`.

use api::v1;
use api::v1::jobs_server;
use calls::Jobs;
use tonic::{Request, Response, Status};

use crate::convert::job_out;
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
            jobs: jobs.iter().map(job_out).collect(),
        }))
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
