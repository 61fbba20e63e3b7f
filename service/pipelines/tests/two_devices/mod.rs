//! Runs a stage on two devices, as two cards do.
#![allow(clippy::expect_used)] // What tests share is outside of them.

use std::sync::mpsc::{Receiver, Sender, channel};

use pipelines::{Observer, Piece, StageError, Values};

use crate::shapes_asked::asked;

/// One of two runs of a stage.
pub(crate) struct Together {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    /// The step after which it is cancelled.
    until: u32,
    done: u32,
    /// Previews after each step.
    pub(crate) previews: Vec<Vec<u8>>,
    /// Whether it shows previews.
    shows: bool,
}

impl Together {
    /// A run that finds no other.
    #[allow(dead_code)] // Each binary takes what it needs.
    pub(crate) fn alone() -> Together {
        let (to, from) = channel();
        Together::new(to, from, u32::MAX, true)
    }

    fn new(to: Sender<Vec<u8>>, from: Receiver<Vec<u8>>, until: u32, shows: bool) -> Together {
        Together {
            to,
            from,
            until,
            done: 0,
            previews: Vec::new(),
            shows,
        }
    }
}

impl Observer for Together {
    fn step(&mut self, n: u32, _of: u32) {
        self.done = n;
    }
    fn wants_preview(&mut self) -> bool {
        self.shows
    }
    fn preview(&mut self, _width: u32, _height: u32, rgb: Vec<u8>) {
        self.previews.push(rgb);
    }
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        self.done >= self.until
    }
    fn meet(&mut self, offer: &[u8]) -> Result<Vec<u8>, StageError> {
        // The other end may be gone.
        let _ = self.to.send(offer.to_vec());
        self.from.recv().map_err(|_| StageError::Cancelled)
    }
}

/// A run of one of two devices: its result, its previews, and the shapes of attention that it used.
pub(crate) type Ran = (Result<Values, StageError>, Vec<Vec<u8>>, Vec<String>);

/// Runs the parts of a stage at once, each by `run`. The second is cancelled after this step; only the first shows previews.
pub(crate) fn together(
    until: u32,
    run: impl Fn(u32, &mut Together) -> Result<Values, StageError> + Sync,
) -> [Ran; 2] {
    let (to_second, from_first) = channel();
    let (to_first, from_second) = channel();
    let part = |part: u32, to, from, until| {
        let mut observer = Together::new(to, from, until, part == 0);
        let (shapes, given) = asked(|| run(part, &mut observer));
        (given, observer.previews, shapes)
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| part(1, to_first, from_first, until));
        let first = part(0, to_second, from_second, u32::MAX);
        [first, second.join().expect("it does not panic")]
    })
}
