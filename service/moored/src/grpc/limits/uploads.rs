//! The bytes of a request as they arrive: counted against its client, with a timeout of pauses.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;

use super::budget::{Exceeded, Taken};
use crate::grpc::status::client_limit;

/// What a call has taken of the budget. Its bytes live as long as the call's handler, which has the other end.
pub(super) type Counted = Arc<Mutex<Taken>>;

/// A request's body.
pub(super) struct Upload {
    inner: Body,
    /// `None` if the reader of the body counts it.
    counted: Option<Counted>,
    /// Bytes that may still come.
    left: u64,
    longest: u64,
    idle: Duration,
    /// Timeout of the current pause; `None` before the first pause.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Upload {
    /// At most `longest` bytes, with pauses of `idle` at the most.
    pub(super) fn new(inner: Body, counted: Option<Counted>, longest: u64, idle: Duration) -> Upload {
        Upload {
            inner,
            counted,
            left: longest,
            longest,
            idle,
            timer: None,
        }
    }

    fn count(&mut self, bytes: u64) -> Result<(), Status> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            client_limit(format!(
                "a request of this method may have {} at the most, and more came",
                residency::Bytes(self.longest)
            ))
        })?;
        let Some(counted) = &self.counted else {
            return Ok(());
        };
        let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.grow(bytes).map_err(refused)
    }

    /// Polls the timeout of a pause; true when it is over.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> bool {
        let idle = self.idle;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(idle)));
        timer.as_mut().poll(context).is_ready()
    }
}

fn refused(exceeded: Exceeded) -> Status {
    client_limit(exceeded.words(
        "requests under way",
        "send them one after another",
        "limits.uploads",
    ))
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let idle = self.idle;
                if let Some(timer) = &mut self.timer {
                    timer.as_mut().reset(Instant::now() + idle);
                }
                let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
                Poll::Ready(Some(self.count(bytes).map(|()| frame)))
            }
            Poll::Pending if self.poll_timeout(context) => {
                let idle = humantime::format_duration(self.idle);
                let problem = format!(
                    "no more of this request arrived for {idle}: send it without pauses, or raise limits.upload_idle"
                );
                Poll::Ready(Some(Err(client_limit(problem))))
            }
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::VecDeque;

    use http_body::Body as _;

    use super::*;
    use crate::grpc::limits::Budget;

    /// A body that has some chunks, and then neither more nor an end.
    pub(in crate::grpc::limits) struct UnfinishedBody(VecDeque<Bytes>);

    impl UnfinishedBody {
        pub(in crate::grpc::limits) fn body(chunks: &[usize]) -> Body {
            Body::new(UnfinishedBody(
                chunks.iter().map(|&size| vec![0; size].into()).collect(),
            ))
        }
    }

    impl http_body::Body for UnfinishedBody {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            match self.0.pop_front() {
                Some(chunk) => Poll::Ready(Some(Ok(Frame::data(chunk)))),
                None => Poll::Pending,
            }
        }
    }

    const IDLE: Duration = Duration::from_secs(30);

    async fn next(upload: &mut Upload) -> Result<usize, Status> {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *upload).poll_frame(context)).await;
        let frame = frame.unwrap_or_else(|| panic!("it has no end"))?;
        Ok(frame.data_ref().map_or(0, Bytes::len))
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_ends_a_request_whose_bytes_count_until_its_call_is_answered() {
        let budget = Budget::new(1000, 1000);
        let counted = Arc::new(Mutex::new(budget.nothing(None)));
        let mut upload = Upload::new(
            UnfinishedBody::body(&[300, 400]),
            Some(counted.clone()),
            u64::MAX,
            IDLE,
        );
        assert_eq!(next(&mut upload).await.unwrap(), 300);
        assert_eq!(next(&mut upload).await.unwrap(), 400);
        let began = Instant::now();
        let late = next(&mut upload).await.unwrap_err();
        assert!(late.message().contains("limits.upload_idle"), "{late}");
        assert_eq!(began.elapsed(), IDLE);
        drop(upload);
        assert_eq!(budget.taken(), 700, "the call may have the bytes still");
        drop(counted);
        assert_eq!(budget.taken(), 0);
    }

    #[tokio::test]
    async fn a_refusal_names_the_exceeded_bound() {
        let budgets = [
            (500, 1000, "limits.uploads_per_client"),
            (1000, 500, "limits.uploads"),
        ];
        for (of_one, of_all, name) in budgets {
            let counted = Arc::new(Mutex::new(Budget::new(of_all, of_one).nothing(None)));
            let mut upload = Upload::new(UnfinishedBody::body(&[300, 400]), Some(counted), u64::MAX, IDLE);
            assert_eq!(next(&mut upload).await.unwrap(), 300);
            let refused = next(&mut upload).await.unwrap_err();
            assert!(refused.message().ends_with(name), "{refused}");
        }
        let counted = Arc::new(Mutex::new(Budget::new(1000, 1000).nothing(None)));
        let mut upload = Upload::new(UnfinishedBody::body(&[300, 400]), Some(counted), 600, IDLE);
        assert_eq!(next(&mut upload).await.unwrap(), 300);
        let refused = next(&mut upload).await.unwrap_err();
        assert!(refused.message().contains("600"), "{refused}");
    }
}
