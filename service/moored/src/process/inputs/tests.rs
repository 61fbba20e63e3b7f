use engine::messages::{Sharing, StageWork, Ticket, Work};
use pipelines::{HostTensor, HostType, Values};

use super::super::frames;
use super::super::frames::tests::{media, order, stage};
use super::*;

fn blob(bytes: usize, of: u8) -> Bytes {
    vec![of; bytes].into()
}

fn work(inputs: &[Bytes]) -> StageWork {
    let [medium, ..] = media();
    let named = |(place, data): (usize, &Bytes)| {
        let tensor = HostTensor {
            dtype: HostType::F32,
            shape: vec![data.len() / 4],
            data: data.clone(),
        };
        (format!("value-{place}"), tensor)
    };
    StageWork {
        values: inputs.iter().enumerate().map(named).collect::<Values>(),
        ..stage(medium)
    }
}

/// An order of stages with these inputs, the first of which the others share passes with.
fn command(stages: &[Vec<Bytes>]) -> Box<Command> {
    let mut works = stages.iter().map(|inputs| work(inputs));
    let mut command = order(Work::Stage(Box::new(works.next().unwrap())));
    if let Command::Run(order) = &mut command {
        let sharing = works.zip(1..).map(|(work, number)| Sharing {
            ticket: Ticket(number),
            job: format!("job-{number}"),
            work,
        });
        order.sharing = sharing.collect();
    }
    Box::new(command)
}

/// Most bytes that the ends keep here.
const BOUND_BYTES: usize = 256 << 10;

/// Bytes of an input.
const SIZE: usize = 100 << 10;

/// Both ends of a pipe.
struct Ends {
    supervisor: RecentInputs,
    worker: RecentInputs,
}

impl Ends {
    fn new() -> Ends {
        Ends {
            supervisor: RecentInputs::within(BOUND_BYTES),
            worker: RecentInputs::within(BOUND_BYTES),
        }
    }

    /// Passes a command over the pipe; the bytes that it took.
    fn pass(&mut self, command: Box<Command>) -> usize {
        let expected = command.clone();
        let mut pipe = Vec::new();
        frames::write(&self.supervisor.send(command), &mut pipe).unwrap();
        let sent = frames::read(&mut pipe.as_slice()).unwrap().unwrap();
        let received = self.worker.receive(sent).unwrap();
        assert!(received == expected, "the worker has another command");
        pipe.len()
    }

    fn kept_bytes(&self) -> [usize; 2] {
        [&self.supervisor, &self.worker].map(|end| end.kept.iter().map(|(_, data)| data.len()).sum())
    }
}

#[test]
fn an_input_is_sent_once_for_all_stages_that_take_it() {
    let mut ends = Ends::new();
    let (text, state) = (blob(SIZE, 1), blob(SIZE, 2));
    let first = ends.pass(command(&[vec![text.clone()], vec![text.clone()]]));
    assert!((SIZE..SIZE + 10_000).contains(&first), "{first}");
    let second = ends.pass(command(&[vec![text.clone(), state]]));
    assert!((SIZE..SIZE + 10_000).contains(&second), "{second}");
}

#[test]
fn equal_bytes_in_another_place_are_sent() {
    let mut ends = Ends::new();
    let first = blob(SIZE, 1);
    ends.pass(command(&[vec![first.clone()]]));
    let again = ends.pass(command(&[vec![blob(SIZE, 1)]]));
    assert!(again > SIZE, "{again}");
}

#[test]
fn both_ends_drop_inputs_that_nothing_else_has() {
    let mut ends = Ends::new();
    ends.pass(command(&[vec![blob(SIZE, 1)]]));
    ends.pass(Box::new(Command::Shutdown));
    assert_eq!(ends.kept_bytes(), [0, 0]);
}

#[test]
fn inputs_beyond_the_bound_are_dropped_and_sent_again() {
    let mut ends = Ends::new();
    let inputs: Vec<Bytes> = (0..5).map(|of| blob(BOUND_BYTES / 4, of)).collect();
    for input in &inputs {
        ends.pass(command(&[vec![input.clone()]]));
        assert!(ends.kept_bytes().iter().all(|bytes| *bytes <= BOUND_BYTES));
    }
    let oldest = ends.pass(command(&[vec![inputs[0].clone()]]));
    assert!(oldest > BOUND_BYTES / 4, "{oldest}");
    let newest = ends.pass(command(&[vec![inputs[4].clone()]]));
    assert!(newest < 10_000, "{newest}");
}

#[test]
fn a_worker_refuses_a_number_that_it_was_not_sent() {
    let mut supervisor = RecentInputs::default();
    let text = blob(SIZE, 1);
    supervisor.send(command(&[vec![text.clone()]]));
    let sent = supervisor.send(command(&[vec![text]]));
    assert!(RecentInputs::default().receive(sent).is_err());
}

proptest::proptest! {
    /// The worker gets each command unchanged, even if inputs are sent again, dropped, or evicted from the bounded cache.
    #[test]
    fn a_worker_gets_every_command_whole(
        turns in proptest::collection::vec((0_usize..8, 0_usize..8, 0_usize..8, proptest::bool::ANY), 1..60),
    ) {
        let sizes = [1 << 10, SHORTEST_BYTES - 1, SHORTEST_BYTES, SIZE, BOUND_BYTES / 3, BOUND_BYTES / 2, BOUND_BYTES, BOUND_BYTES + 1];
        let fresh = |which: usize| blob(sizes[which], which as u8);
        let mut ends = Ends::new();
        let mut inputs: Vec<Bytes> = (0..sizes.len()).map(fresh).collect();
        for (own, shared, replaced, is_replaced) in turns {
            ends.pass(command(&[vec![inputs[own].clone()], vec![inputs[shared].clone()]]));
            if is_replaced {
                inputs[replaced] = fresh(replaced);
            }
            let [supervisor, worker] = ends.kept_bytes();
            proptest::prop_assert_eq!(supervisor, worker);
            proptest::prop_assert!(worker <= BOUND_BYTES);
        }
    }
}
