//! Attention and convolutions by NVIDIA's cuDNN, where it is installed: graphs of operations, which it compiles to a
//! plan for each shape (`graph`, `plan`). Plans are remembered as long as the process lives, and kept in a folder
//! beyond that (`plans`). What it refuses is remembered too, and computed by other kernels.
//!
//! Numbers of descriptors, attributes and modes are those of `cudnn_backend.h` of version 9.
#![allow(unsafe_code)]
// cuDNN's functions.
// Without the feature `cuda` only tests use it: they make plans for cards that are described.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod ahead;
mod attention;
#[cfg(feature = "cuda")]
mod card;
mod convolution;
mod descriptor;
mod graph;
mod library;
mod plan;
mod plans;
#[cfg(test)]
mod without_card;

use std::collections::HashMap;
use std::fmt::{self, Debug, Display, Formatter};
use std::hash::Hash;

use gpu::Timeline;

use ahead::{Ahead, Make};
use attention::Scalars;
use graph::{Graph, Numbers, Wanted};
use plan::{Plan, Target};
#[cfg(not(feature = "cuda"))]
use plans::Folder;

use crate::libraries::{MadeBy, count_plan};
use crate::planned::{Planned, is_asked_in};

#[cfg(feature = "cuda")]
pub(crate) use attention::AttentionAt;
#[cfg(feature = "cuda")]
pub(crate) use card::{OfCard, attention, convolve, make_plans};
#[cfg(feature = "cuda")]
pub(crate) use convolution::ConvolutionAt;
pub(crate) use library::Library;
#[cfg(feature = "cuda")]
pub(crate) use plans::{Folder, keep_plans_in};

/// What plans may take beside their operands, allocated once for a card. Those that want more are not chosen.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// Plans and refusals of one operation that are remembered.
const REMEMBERED: usize = 512;

/// What a call gives.
type Outcome<T> = Result<T, Failure>;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    call: &'static str,
    /// cuDNN's. Thousands say of what kind: 1 the library, 2 what it was told, 3 what it does not support, 4 itself, 5 the
    /// card.
    status: i32,
    reason: String,
}

impl Failure {
    /// What we refuse, as cuDNN says so.
    fn refused(reason: &str) -> Failure {
        Failure {
            call: "the choice of an engine",
            status: 3000,
            reason: reason.to_owned(),
        }
    }

    /// A mistake of ours.
    fn ours(reason: &str) -> Failure {
        Failure {
            call: "the graph",
            status: 2000,
            reason: reason.to_owned(),
        }
    }

    /// Whether another plan may do.
    fn is_of_a_plan(&self) -> bool {
        (3000..5000).contains(&self.status)
    }

    /// Whether it would be the same each time: there is no plan for such a shape.
    fn is_of_the_shape(&self) -> bool {
        (2000..4000).contains(&self.status)
    }

    /// Whether the card may be at fault, and not what was asked of cuDNN.
    fn is_of_the_card(&self) -> bool {
        self.status >= 5000
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Failure { call, status, reason } = self;
        write!(f, "cuDNN: {call} gives {status}")?;
        match reason.is_empty() {
            true => Ok(()),
            false => write!(f, ": {reason}"),
        }
    }
}

impl std::error::Error for Failure {}

/// A shape that plans are made for.
trait Shape: Clone + Debug + Eq + Hash + Send + 'static {
    /// The operation, as files of plans have it.
    const NAME: &'static str;

    /// What its numbers are; `None` where it is known that there is no plan.
    fn numbers(&self) -> Option<Numbers>;

    /// Its graph.
    fn graph(&self, library: &'static Library, numbers: Numbers) -> Outcome<Graph>;

    /// What a run is told that is only recorded: all that is on the card is said to be at this address.
    fn recorded(&self, everywhere: u64) -> Recorded;
}

/// What a run is told. Its scalars are read from here.
struct Recorded {
    at: Vec<(i64, u64)>,
    scalars: Option<Box<Scalars>>,
}

/// Queues a plan, with what its run is told: tensors by their number, and where each is.
type Queue = Box<dyn Fn(&Plan, &[(i64, u64)])>;

/// Has the code of a plan's kernels brought to the card.
struct Bring {
    /// An address on the card.
    everywhere: u64,
    /// Queues the plan where it is only recorded, with what such a run is told.
    queue: Queue,
}

impl Bring {
    fn code_of<S: Shape>(&self, shape: &S, plan: &Plan) {
        let recorded = shape.recorded(self.everywhere);
        (self.queue)(plan, &recorded.at);
        drop(recorded.scalars); // they were read
    }
}

/// What makes plans for one card.
struct Maker {
    library: &'static Library,
    target: Target,
    /// The card, as files of plans have it: compute capability and name.
    card: String,
    /// Where plans are kept beyond this process, if they are.
    folder: Option<Folder>,
    /// For plans that are made ahead.
    bring: Option<Bring>,
}

// SAFETY: a handle, or the description of a card, may be used from any thread, one at a time. Nobody shares a maker.
unsafe impl Send for Maker {}

impl Maker {
    /// What a plan goes by, in the folder and while it is made ahead.
    fn key<S: Shape>(&self, shape: &S) -> String {
        format!("{} {}: {} {shape:?}", self.library.version(), self.card, S::NAME)
    }

    /// The plan of a shape and its text: as it was kept, or new, and then kept. Without text where it cannot be written
    /// down.
    ///
    /// # Errors
    /// Why there is none.
    fn plan<S: Shape>(&self, shape: &S, by: MadeBy) -> Outcome<(Plan, Option<Vec<u8>>)> {
        let mut timeline = Timeline::begin(by.timeline());
        let key = self.key(shape);
        if let Some(text) = self.folder.as_ref().and_then(|folder| folder.read(&key)) {
            match self.load(&text) {
                Ok(plan) => {
                    timeline.part("load a kept plan");
                    return Ok((plan, Some(text)));
                }
                Err(failure) if failure.is_of_the_card() => return Err(failure),
                Err(failure) => tracing::debug!(%failure, "a plan that was kept is made anew"),
            }
        }
        let Some(numbers) = shape.numbers() else {
            return Err(Failure::refused("the shape or dtype is none that it is used for"));
        };
        let wanted = Wanted {
            full_f32: numbers == Numbers::F32,
            workspace: WORKSPACE_BYTES,
        };
        count_plan(by);
        let plan = shape.graph(self.library, numbers)?.plan(&self.target, wanted)?;
        let text = plan
            .text()
            .inspect_err(|failure| tracing::debug!(%failure, "a plan cannot be kept"));
        if let (Some(folder), Ok(text)) = (&self.folder, &text) {
            folder.write(&key, text);
        }
        timeline.part("make a plan");
        Ok((plan, text.ok()))
    }

    /// A plan by its text.
    ///
    /// # Errors
    /// When it is none for this card.
    fn load(&self, text: &[u8]) -> Outcome<Plan> {
        Plan::load(self.library, &self.target, text, WORKSPACE_BYTES)
    }

    /// How a plan is asked for ahead.
    fn ahead<S: Shape>(&self, shape: &S) -> (String, Make<Maker>) {
        let wanted = shape.clone();
        let make = move |maker: &Maker| match maker.plan(&wanted, MadeBy::Ahead)? {
            (plan, Some(text)) => {
                if let Some(bring) = &maker.bring {
                    bring.code_of(&wanted, &plan);
                }
                Ok(text)
            }
            (_, None) => Err(Failure {
                call: "the plan's text",
                status: 4000,
                reason: "it cannot be written down".to_owned(),
            }),
        };
        (self.key(shape), Box::new(make))
    }

    /// How plans are asked for ahead, of shapes that cuDNN is asked for.
    fn all_ahead(&self, planned: &[Planned]) -> Vec<(String, Make<Maker>)> {
        planned
            .iter()
            .filter_map(|planned| match planned {
                Planned::Attention(shape) => is_asked_in(shape.dtype).then(|| self.ahead(shape)),
                Planned::Convolution(shape) => is_asked_in(shape.dtype).then(|| self.ahead(shape)),
            })
            .collect()
    }
}

/// Plans by their shapes; `None` for those that are refused.
struct Made<S>(HashMap<S, Option<Plan>>);

impl<S: Shape> Made<S> {
    fn new() -> Made<S> {
        Made(HashMap::new())
    }

    /// Whether one more is one too many.
    fn is_full_for(&self, shape: &S) -> bool {
        self.0.len() >= REMEMBERED && !self.0.contains_key(shape)
    }

    /// Whether a plan of this shape is here, or would push out others.
    fn has_no_place_for(&self, shape: &S) -> bool {
        self.0.contains_key(shape) || self.is_full_for(shape)
    }

    /// The plan of a shape, or `None` where cuDNN has none: found among those that were made ahead, or made when it is
    /// first asked for. A failure that comes before anything runs is a refusal, unless the card is at fault.
    fn plan(&mut self, maker: &Maker, ahead: &Ahead<Maker>, shape: &S) -> Outcome<Option<&Plan>> {
        if !self.0.contains_key(shape) {
            let plan = match found_or_made(maker, ahead, shape) {
                Ok(plan) => Some(plan),
                Err(failure) if failure.is_of_the_card() => return Err(failure),
                Err(failure) => {
                    tracing::info!(%failure, ?shape, "cuDNN does not take it: other kernels do");
                    None
                }
            };
            self.0.insert(shape.clone(), plan);
        }
        Ok(self.0.get(shape).and_then(Option::as_ref))
    }
}

fn found_or_made<S: Shape>(maker: &Maker, ahead: &Ahead<Maker>, shape: &S) -> Outcome<Plan> {
    let mut timeline = Timeline::begin(MadeBy::Stage.timeline());
    if let Some(found) = ahead.fetch(&maker.key(shape)) {
        timeline.part("wait for a plan made ahead");
        match maker.load(&found?) {
            Err(failure) if !failure.is_of_the_card() => {
                tracing::debug!(%failure, "a plan that was made ahead is made anew");
            }
            loaded => {
                timeline.part("load a plan made ahead");
                return loaded;
            }
        }
    }
    maker.plan(shape, MadeBy::Stage).map(|(plan, _)| plan)
}
