//! Attention and convolutions by NVIDIA's cuDNN, where it is installed: graphs of operations, which it compiles to a
//! plan for each shape (`graph`, `plan`). Plans are remembered as long as the process lives, and kept in a folder
//! beyond that (`plans`). What it refuses is remembered too, and computed by other kernels.
//!
//! Numbers of descriptors, attributes and modes are those of `cudnn_backend.h` of version 9.
#![allow(unsafe_code)]
// cuDNN's functions.
// Without the feature `cuda` only tests use it: they make plans for cards that are described.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

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

use graph::{Graph, Wanted};
use plan::{Plan, Target};
use plans::Folder;

#[cfg(feature = "cuda")]
pub(crate) use attention::AttentionAt;
pub(crate) use attention::{AttentionShape, MaskShape};
#[cfg(feature = "cuda")]
pub(crate) use card::{OfCard, attention, convolve};
#[cfg(feature = "cuda")]
pub(crate) use convolution::ConvolutionAt;
pub(crate) use convolution::ConvolutionShape;
pub(crate) use library::Library;
#[cfg(feature = "cuda")]
pub(crate) use plans::keep_plans_in;

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
trait Shape: Clone + Debug + Eq + Hash {
    /// The operation, as files of plans have it.
    const NAME: &'static str;

    /// Its graph; `None` where it is known that there is no plan.
    fn graph(&self, library: &'static Library) -> Outcome<Option<Graph>>;

    /// What is asked of engines.
    fn wanted(&self) -> Wanted;
}

impl Shape for AttentionShape {
    const NAME: &'static str = "attention";

    fn graph(&self, library: &'static Library) -> Outcome<Option<Graph>> {
        self.numbers()
            .map(|numbers| self.graph(library, numbers))
            .transpose()
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            full_f32: false,
            workspace: WORKSPACE_BYTES,
        }
    }
}

impl Shape for ConvolutionShape {
    const NAME: &'static str = "convolution";

    fn graph(&self, library: &'static Library) -> Outcome<Option<Graph>> {
        self.numbers()
            .map(|numbers| self.graph(library, numbers))
            .transpose()
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            full_f32: self.dtype == candle_core::DType::F32,
            workspace: WORKSPACE_BYTES,
        }
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
}

impl Maker {
    /// The plan of a shape: as it was kept, or new, and then kept.
    ///
    /// # Errors
    /// Why there is none.
    fn plan<S: Shape>(&self, shape: &S) -> Outcome<Plan> {
        let wanted = shape.wanted();
        let key = format!("{} {}: {} {shape:?}", self.library.version(), self.card, S::NAME);
        if let Some(text) = self.folder.as_ref().and_then(|folder| folder.read(&key)) {
            match Plan::load(self.library, &self.target, &text, wanted.workspace) {
                Ok(plan) => return Ok(plan),
                Err(failure) if failure.is_of_the_card() => return Err(failure),
                Err(failure) => tracing::debug!(%failure, "a plan that was kept is made anew"),
            }
        }
        let Some(graph) = shape.graph(self.library)? else {
            return Err(Failure::refused("the shape or dtype is none that it is used for"));
        };
        let plan = graph.plan(&self.target, wanted)?;
        if let Some(folder) = &self.folder {
            match plan.text() {
                Ok(text) => folder.write(&key, &text),
                Err(failure) => tracing::debug!(%failure, "a plan cannot be kept"),
            }
        }
        Ok(plan)
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

    /// The plan of a shape, made when it is first asked for, or `None` where cuDNN has none. A failure that comes before
    /// anything runs is a refusal, unless the card is at fault.
    fn plan(&mut self, maker: &Maker, shape: &S) -> Outcome<Option<&Plan>> {
        if !self.0.contains_key(shape) {
            let plan = match maker.plan(shape) {
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
