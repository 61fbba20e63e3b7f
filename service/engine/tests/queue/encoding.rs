//! Pieces that the service itself encodes: the stage that delivers them waits for the encoder, and no client can hold them up.

use std::time::Duration;

use bytes::Bytes as Data;
use engine::Error;
use engine::messages::{Command, Order, Outcome, Progress};
use engine::queue::{Job, PiecesToEncode, Queue, Settings};
use model::{MediaFormat, Piece};
use residency::Bytes;

use crate::fixture::picture;
use crate::worker::{Wire, Worker, at_rest, end, one_card_with, settle, stage_of};

/// Sides of a frame of 48 MiB: of two, the worker waits until they are taken.
const SIDE: u32 = 4096;
const FRAME: Bytes = Bytes(3 * (SIDE as u64) * (SIDE as u64));
const FRAMES: u32 = 6;

/// A queue whose clients may leave one frame unread, and in which two frames may wait for the encoder.
async fn small() -> (Queue, Worker) {
    one_card_with(Settings {
        unread_pictures: FRAME,
        unencoded: Bytes(2 * FRAME.0),
        ..Settings::default()
    })
    .await
}

/// A job whose result is encoded, at its decode.
async fn decoding(queue: &Queue, worker: &mut Worker, instead: bool) -> (Job, PiecesToEncode, Order) {
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let pieces = job.encode(instead);
    let order = loop {
        let order = worker.order().await;
        if stage_of(&order) == "decode" {
            break order;
        }
        worker.complete(&order);
    };
    worker.begin(&order).unwrap();
    (job, pieces, order)
}

fn frame(number: u32, data: &Data) -> Progress {
    Progress::Piece(Piece {
        track: String::new(),
        format: MediaFormat::Video {
            width: SIDE,
            height: SIDE,
            frames: FRAMES,
            frames_per_second: 24.0,
            sound: None,
        },
        first: u64::from(number),
        data: data.clone(),
    })
}

/// The bytes that the worker knows to be taken, if it was told something.
async fn taken(worker: &mut Worker) -> Option<u64> {
    settle().await;
    match worker.try_next()? {
        Wire::Command(Command::Taken { bytes, .. }) => Some(bytes.0 / FRAME.0),
        Wire::Command(other) => panic!("{other:?}"),
        Wire::Recycle(reason) => panic!("{reason}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_stage_waits_for_a_slow_encoder_and_every_piece_comes() {
    let (queue, mut worker) = small().await;
    let (job, mut pieces, order) = decoding(&queue, &mut worker, true).await;
    let data = Data::from(vec![0; FRAME.0 as usize]);
    for number in 0..2 {
        worker.progress(order.ticket, frame(number, &data));
        assert_eq!(taken(&mut worker).await, Some(u64::from(number) + 1));
    }
    for number in 2..4 {
        worker.progress(order.ticket, frame(number, &data));
    }
    assert_eq!(taken(&mut worker).await, None, "four wait, and two may");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(
        taken(&mut worker).await,
        None,
        "a worker that waits for us does not hang"
    );
    let mut numbers = Vec::new();
    for _ in 0..2 {
        assert_eq!(taken(&mut worker).await, None);
        numbers.push(pieces.next().await.unwrap().piece.first);
    }
    assert_eq!(taken(&mut worker).await, Some(4));
    for number in 4..FRAMES {
        worker.progress(order.ticket, frame(number, &data));
    }
    settle().await;
    while numbers.len() < FRAMES as usize {
        numbers.push(pieces.next().await.unwrap().piece.first);
    }
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5], "none is lost, in their order");
    assert_eq!(taken(&mut worker).await, Some(6));
    // Nothing of it was the client's to read, and it has read nothing.
    drop(job);
    worker.finish(order.ticket, Outcome::Cancelled);
    assert!(pieces.next().await.is_none());
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_stage_does_not_wait_for_an_encoder_that_has_left() {
    for gone in ["encoder", "client"] {
        let (queue, mut worker) = small().await;
        let (job, pieces, order) = decoding(&queue, &mut worker, true).await;
        let data = Data::from(vec![0; FRAME.0 as usize]);
        for number in 0..2 {
            worker.progress(order.ticket, frame(number, &data));
            taken(&mut worker).await;
        }
        for number in 2..5 {
            worker.progress(order.ticket, frame(number, &data));
        }
        assert_eq!(taken(&mut worker).await, None);
        match gone {
            "encoder" => {
                drop(pieces);
                assert_eq!(taken(&mut worker).await, Some(5));
                drop(job);
            }
            _ => drop((job, pieces)),
        }
        settle().await;
        let mut cancelled = false;
        while let Some(told) = worker.try_next() {
            cancelled |= matches!(told, Wire::Command(Command::Cancel(_)));
        }
        assert!(cancelled, "{gone}");
        worker.finish(order.ticket, Outcome::Cancelled);
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_pieces_is_dropped_although_they_are_encoded_too() {
    let (queue, mut worker) = small().await;
    let (mut job, mut pieces, order) = decoding(&queue, &mut worker, false).await;
    let data = Data::from(vec![0; FRAME.0 as usize]);
    for number in 0..3 {
        worker.progress(order.ticket, frame(number, &data));
    }
    settle().await;
    assert!(matches!(end(&mut job).await, Err(Error::SlowReader { .. })));
    assert!(pieces.next().await.is_none(), "nothing of it is encoded any more");
    worker.finish(order.ticket, Outcome::Cancelled);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn pieces_that_came_before_are_encoded_too() {
    let (queue, mut worker) = small().await;
    let mut spec = picture("a", "me", "a cat");
    spec.options.idempotency_key = "key".into();
    let mut first = queue.submit(spec.clone()).await.unwrap();
    while worker.try_work().await {}
    let mut again = queue.submit(spec).await.unwrap();
    assert!(again.joined);
    let mut pieces = again.encode(true);
    assert!(pieces.next().await.is_some());
    assert!(pieces.next().await.is_none());
    assert_eq!((end(&mut first).await, end(&mut again).await), (Ok(()), Ok(())));
    at_rest(&queue).await;
}
