//! Records the shapes that operations use.
#![allow(clippy::expect_used)] // What tests share is outside of them.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;

use ops::{PLANNED_TARGET, Planned};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    /// Distinct shapes used by this thread.
    static SHAPES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// The tracing subscriber.
struct Asked;

impl Visit for Asked {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let shape = format!("{value:?}");
        SHAPES.with_borrow_mut(|all| {
            if field.name() == "planned" && !all.contains(&shape) {
                all.push(shape);
            }
        });
    }
}

impl Subscriber for Asked {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == PLANNED_TARGET
    }
    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut Asked);
    }
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

/// The shapes that `work` uses, and its result. One subscriber serves all threads: an event that is first emitted on
/// a thread without subscriber would be disabled on all.
pub(crate) fn asked<R>(work: impl FnOnce() -> R) -> (Vec<String>, R) {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Asked).expect("the only subscriber"));
    SHAPES.take();
    let result = work();
    (SHAPES.take(), result)
}

/// In order of use.
pub(crate) fn words(planned: &[Planned]) -> Vec<String> {
    planned.iter().map(|shape| format!("{shape:?}")).collect()
}
