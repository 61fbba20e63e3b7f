//! Attention and convolutions by NVIDIA's cuDNN, if installed: operation graphs, compiled to one plan per shape
//! (`graph`, `plan`). Plans are cached in memory, and on disk (`plans`). Refusals are cached too; such shapes are
//! computed by other kernels.
//!
//! Descriptor types, attributes and modes are numbered as in `cudnn_backend.h` of version 9.
#![allow(unsafe_code)]
// cuDNN's functions.
// Without the feature `cuda` only tests use it: they compile plans for described cards.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod ahead;
mod attention;
#[cfg(feature = "cuda")]
mod card;
mod convolution;
mod descriptor;
mod graph;
mod in_tiles;
mod library;
mod plan;
mod plans;
#[cfg(test)]
mod without_card;

use std::collections::HashMap;
use std::fmt::{self, Debug, Display, Formatter};
use std::hash::Hash;
use std::sync::Arc;

use gpu::Timeline;

use ahead::{Ahead, Make};
use attention::Scalars;
use graph::{DataType, Graph, Wanted};
#[cfg(not(feature = "cuda"))]
use in_tiles::InTiles;
use plan::CompileTarget;
pub(crate) use plan::Plan;
#[cfg(not(feature = "cuda"))]
use plans::Folder;

use crate::libraries::{MadeBy, count_plan};
use crate::planned::{AttentionShape, Planned, uses_cudnn_in};

#[cfg(feature = "cuda")]
pub(crate) use attention::{AttentionAt, FP8_SCALE_BYTES, Fp8Scales};
#[cfg(feature = "cuda")]
pub(crate) use card::{Cudnn, OfCard, attention, convolve, in_fp8, in_tiles, make_plans, workspace};
#[cfg(feature = "cuda")]
pub(crate) use convolution::ConvolutionAt;
#[cfg(feature = "cuda")]
pub(crate) use in_tiles::InTiles;
pub(crate) use library::Library;
#[cfg(feature = "cuda")]
pub(crate) use plans::{Folder, keep_plans_in};

/// Workspace shared by all plans of a card. Plans that need more are not chosen.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// The first compute capability for which cuDNN has attention in e4m3.
pub(crate) const FP8_ATTENTION_SINCE: u32 = 90;

/// How the names of cards of compute capability 9.0 begin in keys of plans.
const HOPPER: &str = "sm_90 ";

/// Capacity of the in-memory cache per operation, plans and refusals.
const REMEMBERED: usize = 512;

/// Result of a cuDNN call.
type Outcome<T> = Result<T, Failure>;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    call: &'static str,
    /// cuDNN's status. The thousands give the category: 1 library, 2 bad parameter, 3 not supported, 4 internal, 5
    /// execution.
    status: i32,
    reason: String,
}

impl Failure {
    /// A refusal of our own, with cuDNN's status for unsupported.
    fn refused(reason: &str) -> Failure {
        Failure {
            call: "the choice of an engine",
            status: 3000,
            reason: reason.to_owned(),
        }
    }

    /// A bug of ours.
    fn ours(reason: &str) -> Failure {
        Failure {
            call: "the graph",
            status: 2000,
            reason: reason.to_owned(),
        }
    }

    /// Whether another plan may succeed.
    fn is_of_a_plan(&self) -> bool {
        (3000..5000).contains(&self.status)
    }

    /// Whether the refusal is permanent: there is no plan for this shape.
    fn is_of_the_shape(&self) -> bool {
        (2000..4000).contains(&self.status)
    }

    /// Whether the card may be at fault, rather than the request.
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

/// A shape that is the key of a plan.
trait PlanShape: Clone + Debug + Eq + Hash + Send + 'static {
    /// Name of the operation in the files of plans.
    const NAME: &'static str;

    /// Data type; `None` if there is certainly no plan.
    fn numbers(&self) -> Option<DataType>;

    /// The operation graph of this shape.
    fn graph(&self, library: &'static Library, numbers: DataType) -> Outcome<Graph>;

    /// Arguments of a captured run: all addresses are `everywhere`.
    fn recorded(&self, everywhere: u64) -> Recorded;
}

/// Arguments of a run. Owns its scalars.
struct Recorded {
    at: Vec<(i64, u64)>,
    scalars: Option<Box<Scalars>>,
}

/// Enqueues a plan with tensors by unique id and address.
type Queue = Box<dyn Fn(&Plan, &[(i64, u64)])>;

/// Loads the code of a plan's kernels to the card.
struct CodeLoader {
    /// An address on the card.
    everywhere: u64,
    /// Enqueues the plan on a capturing stream.
    queue: Queue,
}

impl CodeLoader {
    fn code_of<S: PlanShape>(&self, shape: &S, plan: &Plan) {
        let recorded = shape.recorded(self.everywhere);
        (self.queue)(plan, &recorded.at);
        drop(recorded.scalars); // lived until the run was enqueued
    }
}

/// Compiles plans for one card.
struct Maker {
    library: &'static Library,
    target: CompileTarget,
    /// The card in the keys of plans: compute capability and name.
    card: String,
    /// The on-disk cache, if enabled.
    folder: Option<Folder>,
    /// For plans that are compiled ahead of time.
    code_loader: Option<CodeLoader>,
}

// SAFETY: a handle, or the description of a card, may be used from any thread, one at a time. A maker is not shared.
unsafe impl Send for Maker {}

impl Maker {
    /// An attention as it is computed: as one, or in two.
    fn in_tiles(&self, shape: &AttentionShape) -> Option<InTiles> {
        self.card
            .starts_with(HOPPER)
            .then(|| InTiles::of(shape))
            .flatten()
    }

    /// The card's compute capability, as 90 for 9.0.
    fn capability(&self) -> u32 {
        let digits = self
            .card
            .strip_prefix("sm_")
            .and_then(|rest| rest.split(' ').next());
        digits.and_then(|digits| digits.parse().ok()).unwrap_or_default()
    }

    /// The shapes for which cuDNN compiles plans.
    fn planned(&self, planned: &Planned) -> Vec<Planned> {
        match planned {
            Planned::Attention(shape) if shape.in_fp8 && self.capability() < FP8_ATTENTION_SINCE => self
                .planned(&Planned::Attention(AttentionShape {
                    in_fp8: false,
                    ..shape.clone()
                })),
            Planned::Attention(shape) => match self.in_tiles(shape) {
                Some(InTiles { whole, rest, .. }) => {
                    vec![Planned::Attention(whole), Planned::Attention(rest)]
                }
                None => vec![planned.clone()],
            },
            Planned::Convolution(_) => vec![planned.clone()],
        }
    }

    /// Key of a plan, on disk and in the background queue.
    fn key<S: PlanShape>(&self, shape: &S) -> String {
        format!("{} {}: {} {shape:?}", self.library.version(), self.card, S::NAME)
    }

    /// The plan of a shape and its text: from the disk cache, or newly compiled and then cached. No text if it cannot
    /// be serialized.
    ///
    /// # Errors
    /// The reason why the shape has no plan.
    fn plan<S: PlanShape>(&self, shape: &S, by: MadeBy) -> Outcome<(Plan, Option<Vec<u8>>)> {
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
            full_f32: numbers == DataType::F32,
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

    /// Loads a plan from its text.
    ///
    /// # Errors
    /// When it is not a plan for this card.
    fn load(&self, text: &[u8]) -> Outcome<Plan> {
        Plan::load(self.library, &self.target, text, WORKSPACE_BYTES)
    }

    /// A request for background compilation.
    fn ahead<S: PlanShape>(&self, shape: &S) -> (String, Make<Maker>) {
        let wanted = shape.clone();
        let make = move |maker: &Maker| match maker.plan(&wanted, MadeBy::Ahead)? {
            (plan, Some(text)) => {
                if let Some(code_loader) = &maker.code_loader {
                    code_loader.code_of(&wanted, &plan);
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

    /// Requests for background compilation of several shapes.
    fn all_ahead(&self, planned: &[Planned]) -> Vec<(String, Make<Maker>)> {
        planned
            .iter()
            .filter_map(|planned| match planned {
                Planned::Attention(shape) => uses_cudnn_in(shape.dtype).then(|| self.ahead(shape)),
                Planned::Convolution(shape) => uses_cudnn_in(shape.dtype).then(|| self.ahead(shape)),
            })
            .collect()
    }
}

/// In-memory cache of plans by shape; `None` for refusals. Recorded work keeps the plans that it was enqueued by.
struct Made<S>(HashMap<S, Option<Arc<Plan>>>);

impl<S: PlanShape> Made<S> {
    fn new() -> Made<S> {
        Made(HashMap::new())
    }

    /// Whether adding this shape would exceed the capacity.
    fn is_full_for(&self, shape: &S) -> bool {
        self.0.len() >= REMEMBERED && !self.0.contains_key(shape)
    }

    /// Whether a plan of this shape is cached, or would evict others.
    fn has_no_place_for(&self, shape: &S) -> bool {
        self.0.contains_key(shape) || self.is_full_for(shape)
    }

    /// The plan of a shape, or `None` if cuDNN has none: from the cache, from background compilation, or compiled
    /// now. A failure before execution is a refusal, unless the card is at fault.
    fn plan(&mut self, maker: &Maker, ahead: &Ahead<Maker>, shape: &S) -> Outcome<Option<&Arc<Plan>>> {
        if !self.0.contains_key(shape) {
            let plan = match found_or_made(maker, ahead, shape) {
                Ok(plan) => Some(Arc::new(plan)),
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

fn found_or_made<S: PlanShape>(maker: &Maker, ahead: &Ahead<Maker>, shape: &S) -> Outcome<Plan> {
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
