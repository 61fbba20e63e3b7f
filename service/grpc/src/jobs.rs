//! `moored.v1.Jobs`.

use api::v1;
use api::v1::jobs_server::Jobs;
use engine::queue::Queue;
use tonic::{Request, Response, Status};

use crate::convert::job_out;
use crate::requests::caller_of;
use crate::status::status_of;

/// The calls of `moored.v1.Jobs`.
pub(crate) struct JobsDoor(pub(crate) Queue);

#[tonic::async_trait]
impl Jobs for JobsDoor {
    async fn list(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let jobs = self.0.jobs(request.into_inner().include_ended).await;
        Ok(Response::new(v1::ListJobsResponse {
            jobs: jobs.iter().map(job_out).collect(),
        }))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelJobRequest>,
    ) -> Result<Response<v1::CancelJobResponse>, Status> {
        let caller = caller_of(&request);
        let asked = request.into_inner();
        let client = caller.name(asked.client_id).map_err(|e| status_of(&e))?;
        let cancelled = if asked.release_latents {
            self.0.discard(&asked.job_id, client).await
        } else {
            self.0.cancel(&asked.job_id, client).await
        };
        let cancelled = cancelled.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::CancelJobResponse { cancelled }))
    }
}
