//! Hears which shapes operations are asked for.
#![allow(clippy::expect_used)] // What tests share is outside of them.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;

use ops::{ASKED, Planned};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    /// Shapes that this thread asked for, each once.
    static SHAPES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Hears which shapes are asked for.
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
        metadata.target() == ASKED
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

/// What some work asks for, and what it gives. One subscriber serves all threads: what threads without one ask for first is
/// not told to others either.
pub(crate) fn asked<R>(work: impl FnOnce() -> R) -> (Vec<String>, R) {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Asked).expect("the only subscriber"));
    SHAPES.take();
    let result = work();
    (SHAPES.take(), result)
}

/// As they are told.
pub(crate) fn words(planned: &[Planned]) -> Vec<String> {
    planned.iter().map(|shape| format!("{shape:?}")).collect()
}
