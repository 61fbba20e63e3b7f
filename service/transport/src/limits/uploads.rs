//! The bytes of a request as they arrive: counted against its client, with a timeout of pauses.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use calls::{Exceeded, Taken};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;

use super::lock;
use crate::refusal::Refusal;

/// A call's charge on the budget, shared with the call's handler: the bytes count for as long as the handler keeps it.
pub(super) type Counted = Arc<Mutex<Taken>>;

/// A request's body.
pub(super) struct Upload {
    inner: Body,
    /// `None` if the reader of the body counts it.
    counted: Option<Counted>,
    /// Set if the request is a stream whose messages count one by one.
    messages: Option<Messages>,
    /// Bytes that may still arrive.
    left: u64,
    longest: u64,
    idle: Duration,
    /// Timeout of the current pause; `None` before the first pause.
    timer: Option<Pin<Box<Sleep>>>,
    /// Timeout of the whole request, and how long that is.
    whole: Option<(Pin<Box<Sleep>>, Duration)>,
}

impl Upload {
    /// At most `longest` bytes, with pauses of `idle` at the most.
    pub(super) fn new(inner: Body, counted: Option<Counted>, longest: u64, idle: Duration) -> Upload {
        Upload {
            inner,
            counted,
            messages: None,
            left: longest,
            longest,
            idle,
            timer: None,
            whole: None,
        }
    }

    /// The same, with a timeout of the whole request: a client that sends byte by byte makes no pauses.
    pub(super) fn within(self, whole: Duration) -> Upload {
        Upload {
            whole: Some((Box::pin(tokio::time::sleep(whole)), whole)),
            ..self
        }
    }

    /// The same, as a stream of messages of this length at most. The message that is arriving counts with its whole length.
    pub(super) fn by_message(self, longest: u64) -> Upload {
        Upload {
            messages: Some(Messages::new(longest)),
            ..self
        }
    }

    fn count(&mut self, data: &[u8]) -> Result<(), Refusal> {
        let bytes = data.len() as u64;
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or_else(|| too_large(self.longest))?;
        let Some(counted) = &self.counted else {
            return Ok(());
        };
        let mut counted = lock(counted);
        match &mut self.messages {
            None => counted.grow(bytes).map_err(refused),
            Some(messages) => messages.follow(data, |length| counted.set(length).map_err(refused)),
        }
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

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const MESSAGE_HEAD_BYTES: usize = 5;

/// The messages of a stream, whose bytes arrive in pieces of any length.
struct Messages {
    longest: u64,
    /// The received part of the next message's head.
    head: Vec<u8>,
    /// Bytes of the message that are still to arrive.
    left: usize,
}

impl Messages {
    fn new(longest: u64) -> Messages {
        Messages {
            longest,
            head: Vec::with_capacity(MESSAGE_HEAD_BYTES),
            left: 0,
        }
    }

    /// Calls `begins` with the length of each message whose head ends in these bytes.
    fn follow(
        &mut self,
        mut data: &[u8],
        mut begins: impl FnMut(u64) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        while !data.is_empty() {
            let of_message = self.left.min(data.len());
            self.left -= of_message;
            data = &data[of_message..];
            let of_head = data.len().min(MESSAGE_HEAD_BYTES - self.head.len());
            self.head.extend_from_slice(&data[..of_head]);
            data = &data[of_head..];
            let Some(&[_, a, b, c, d]) = self.head.first_chunk::<MESSAGE_HEAD_BYTES>() else {
                return Ok(()); // the data ended in a message or a head
            };
            let length = u32::from_be_bytes([a, b, c, d]);
            self.head.clear();
            if u64::from(length) > self.longest {
                let (bytes, most) = (length.into(), self.longest);
                return Err(Refusal::TooLongMessage { bytes, most });
            }
            self.left = length as usize;
            begins(length.into())?;
        }
        Ok(())
    }
}

/// The refusal of a request that is longer than its method takes.
pub(super) fn too_large(longest: u64) -> Refusal {
    Refusal::TooLarge(format!(
        "this request is larger than {}, which is the most that this method takes: send less in one request",
        residency::Bytes(longest)
    ))
}

fn refused(exceeded: Exceeded) -> Refusal {
    Refusal::ClientLimit(exceeded.words(
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
        if let Some((timer, whole)) = &mut self.whole
            && timer.as_mut().poll(context).is_ready()
        {
            let whole = humantime::format_duration(*whole);
            let problem =
                format!("a request without the token may take {whole}: send the token, or call again");
            return Poll::Ready(Some(Err(Refusal::ClientLimit(problem).into())));
        }
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let idle = self.idle;
                if let Some(timer) = &mut self.timer {
                    timer.as_mut().reset(Instant::now() + idle);
                }
                let counted = frame.data_ref().map_or(Ok(()), |data| self.count(data));
                Poll::Ready(Some(counted.map(|()| frame).map_err(Status::from)))
            }
            Poll::Pending if self.poll_timeout(context) => {
                let idle = humantime::format_duration(self.idle);
                let problem = format!(
                    "no more of this request arrived for {idle}: send it without pauses, or raise limits.upload_idle"
                );
                Poll::Ready(Some(Err(Refusal::ClientLimit(problem).into())))
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
    use calls::Budget;

    /// A body that has some chunks, and then neither more nor an end.
    pub(in crate::limits) struct UnfinishedBody(VecDeque<Bytes>);

    impl UnfinishedBody {
        pub(in crate::limits) fn body(chunks: &[usize]) -> Body {
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

    #[tokio::test(start_paused = true)]
    async fn a_request_past_its_time_limit_is_ended_although_data_keeps_arriving() {
        /// A byte for each half of a pause that is too long.
        struct Drip(Pin<Box<Sleep>>);

        impl http_body::Body for Drip {
            type Data = Bytes;
            type Error = Status;

            fn poll_frame(
                mut self: Pin<&mut Self>,
                context: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
                std::task::ready!(self.0.as_mut().poll(context));
                self.0.as_mut().reset(Instant::now() + IDLE / 2);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
            }
        }

        let began = Instant::now();
        let body = Body::new(Drip(Box::pin(tokio::time::sleep(IDLE / 2))));
        let mut upload = Upload::new(body, None, u64::MAX, IDLE).within(IDLE * 2);
        let refused = loop {
            if let Err(refused) = next(&mut upload).await {
                break refused;
            }
        };
        assert!(refused.message().contains("without the token"), "{refused}");
        assert_eq!(began.elapsed(), IDLE * 2);
    }

    #[tokio::test]
    async fn of_a_stream_the_message_that_is_arriving_counts_whole() {
        let budget = Budget::new(1000, 1000);
        let counted = Arc::new(Mutex::new(budget.nothing(None)));
        let message = |length: u32| [&[0], &length.to_be_bytes()[..], &vec![7; length as usize]].concat();
        let stream = [message(600), message(0), message(50), message(700)].concat();
        // In pieces of every length: 3 cuts heads, 700 has several messages.
        for piece in [1, 3, 5, 700, stream.len()] {
            let mut messages = Messages::new(700);
            let mut begun = Vec::new();
            for part in stream.chunks(piece) {
                let begins = |length| {
                    begun.push(length);
                    Ok(())
                };
                messages.follow(part, begins).unwrap();
            }
            assert_eq!(begun, [600, 0, 50, 700], "in pieces of {piece}");
        }
        let pieces: VecDeque<Bytes> = [&stream[..5], &stream[5..600], &stream[600..615]]
            .map(Bytes::copy_from_slice)
            .into();
        let body = Body::new(UnfinishedBody(pieces));
        let mut upload = Upload::new(body, Some(counted), u64::MAX, IDLE).by_message(700);
        for taken in [600, 600, 50] {
            next(&mut upload).await.unwrap();
            assert_eq!(budget.taken(), taken);
        }
        let too_long = Messages::new(699).follow(&stream[stream.len() - 705..], |_| Ok(()));
        assert!(matches!(too_long, Err(Refusal::TooLongMessage { most: 699, .. })));
        drop(upload);
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
