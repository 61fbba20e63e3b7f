//! Every call is counted, with the reason for which it is refused.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use calls::Metrics;
use prost::Message as _;
use tonic::body::Body;
use tonic::codegen::http::Response;
use tonic::{Code, Status};
use tonic_types::pb;

use crate::methods::Method;
use crate::protocol::Protocol;

/// A mark in the extensions of an answer: its request was refused for this reason, as errors.proto spells it. gRPC has the reason in
/// its headers.
#[derive(Clone, Copy, Debug)]
pub struct RefusedFor(pub &'static str);

/// Counts calls by the names of their protocol and method.
pub(crate) fn count(metrics: &Metrics, protocol: &Protocol, method: &Method, refused: Option<String>) {
    let name = match method.path {
        "" => "unknown", // so that nobody makes names of his own
        path => path,
    };
    metrics.called(protocol.name, name, refused);
}

/// An answer, which is counted when it begins.
pub(crate) struct Counted<F> {
    pub(crate) answered: F,
    pub(crate) protocol: &'static Protocol,
    pub(crate) method: &'static Method,
    pub(crate) metrics: Arc<Metrics>,
}

impl<F: Future<Output = Result<Response<Body>, Infallible>> + Unpin> Future for Counted<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let response = ready!(Pin::new(&mut self.answered).poll(context))?;
        count(&self.metrics, self.protocol, self.method, reason_of(&response));
        Poll::Ready(Ok(response))
    }
}

/// The reason for which a call is refused. An answer that ends with an error after it has begun is that of a job, which is counted as a job.
fn reason_of(response: &Response<Body>) -> Option<String> {
    if let Some(RefusedFor(reason)) = response.extensions().get() {
        return Some((*reason).to_owned());
    }
    let status = Status::from_header_map(response.headers())?;
    if status.code() == Code::Ok {
        return None;
    }
    let details = pb::Status::decode(status.details()).unwrap_or_default();
    let info = details.details.iter().find_map(|detail| {
        let is_info = detail.type_url.ends_with("/google.rpc.ErrorInfo");
        is_info.then(|| pb::ErrorInfo::decode(&*detail.value).ok())?
    });
    // What gRPC itself refuses has no reason of ours.
    Some(info.map_or_else(
        || format!("{:?}", status.code()).to_uppercase(),
        |info| info.reason,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::Refusal;

    #[test]
    fn the_reason_of_a_refusal_is_found() {
        let refused = Status::from(Refusal::RoleRequired("no".to_owned())).into_http();
        assert_eq!(reason_of(&refused).as_deref(), Some("ROLE_REQUIRED"));
        let unknown = Status::unimplemented("").into_http();
        assert_eq!(reason_of(&unknown).as_deref(), Some("UNIMPLEMENTED"));
        assert_eq!(reason_of(&Response::new(Body::empty())), None);
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(RefusedFor("MODEL_NOT_FOUND"));
        assert_eq!(reason_of(&response).as_deref(), Some("MODEL_NOT_FOUND"));
    }
}
