//! Answers end when the token of their call no longer counts: it was withdrawn, or has expired. Else who watches the service, or plays a
//! session, would go on for as long as the connection lasts.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use crate::protocol::Protocol;
use crate::refusal::Refusal;

/// Resolves when the token of a call no longer counts.
pub(crate) type Withdrawn = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The refusal of a call whose token no longer counts.
pub(crate) fn refusal() -> Refusal {
    Refusal::Unauthenticated(
        "the token was withdrawn, or has expired, while the call was answered".to_owned(),
    )
}

/// The body of an answer.
pub(crate) struct Guarded {
    /// `None` once it has ended.
    body: Option<Body>,
    withdrawn: Withdrawn,
    protocol: &'static Protocol,
}

impl Guarded {
    /// This body, which ends with a refusal once the token is withdrawn.
    pub(crate) fn new(body: Body, withdrawn: Withdrawn, protocol: &'static Protocol) -> Guarded {
        Guarded {
            body: Some(body),
            withdrawn,
            protocol,
        }
    }
}

impl http_body::Body for Guarded {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.body.is_some() && self.withdrawn.as_mut().poll(context).is_ready() {
            self.body = None; // it ends a job's listener
            return Poll::Ready(Some(self.protocol.end(refusal())));
        }
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(SizeHint::default, http_body::Body::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use http_body::Body as _;
    use tonic::codegen::http::header::CONTENT_TYPE;

    use super::*;
    use crate::protocol::tests::GRPC;

    /// A body that never ends, and tells when it is dropped.
    struct Endless(Option<tokio::sync::oneshot::Sender<()>>);

    impl http_body::Body for Endless {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Pending
        }
    }

    impl Drop for Endless {
        fn drop(&mut self) {
            let _ = self.0.take().map(|dropped| dropped.send(()));
        }
    }

    #[tokio::test]
    async fn an_answer_ends_with_its_token_and_says_why() {
        let (withdraw, withdrawn) = tokio::sync::oneshot::channel::<()>();
        let (dropped, is_dropped) = tokio::sync::oneshot::channel();
        let withdrawn = Box::pin(async { drop(withdrawn.await) });
        let body = Body::new(Endless(Some(dropped)));
        let mut guarded = Box::pin(Guarded::new(body, withdrawn, &GRPC));
        let mut next = async || poll_fn(|context| guarded.as_mut().poll_frame(context)).await;
        {
            let mut first = Box::pin(next());
            assert!(futures::poll!(first.as_mut()).is_pending());
            withdraw.send(()).unwrap();
            let trailers = first.await.unwrap().unwrap().into_trailers().unwrap();
            let status = Status::from_header_map(&trailers).unwrap();
            assert_eq!(status.code(), tonic::Code::Unauthenticated);
            assert!(trailers.get(CONTENT_TYPE).is_none());
        }
        is_dropped.await.unwrap();
        assert!(next().await.is_none());
    }
}
