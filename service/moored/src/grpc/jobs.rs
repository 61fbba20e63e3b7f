//! `moored.v1.Jobs`.

use api::v1;
use api::v1::jobs_server::Jobs;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::convert::job_out;
use super::server::Service;
use super::status::status_of;

#[tonic::async_trait]
impl Jobs for Service {
    async fn list(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let jobs = self.queue.jobs(request.into_inner().include_ended).await;
        Ok(Response::new(v1::ListJobsResponse {
            jobs: jobs.iter().map(job_out).collect(),
        }))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelJobRequest>,
    ) -> Result<Response<v1::CancelJobResponse>, Status> {
        let caller = Caller::of(&request);
        let asked = request.into_inner();
        let client = caller.name(asked.client_id).map_err(|e| status_of(&e))?;
        let cancelled = if asked.release_latents {
            self.queue.discard(&asked.job_id, client).await
        } else {
            self.queue.cancel(&asked.job_id, client).await
        };
        let cancelled = cancelled.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::CancelJobResponse { cancelled }))
    }
}
