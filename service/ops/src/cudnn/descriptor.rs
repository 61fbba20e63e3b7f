//! cuDNN's backend descriptors: each is created, filled, finalized, and destroyed once.

use std::ffi::c_void;
use std::ptr;

use super::{Library, Outcome};

/// Descriptor types, by cuDNN's numbering.
pub(super) mod kind {
    pub(crate) const POINTWISE: i32 = 0;
    pub(crate) const CONVOLUTION: i32 = 1;
    pub(crate) const ENGINE: i32 = 2;
    pub(crate) const CONFIGURATION: i32 = 3;
    pub(crate) const HEURISTICS: i32 = 4;
    pub(crate) const PLAN: i32 = 5;
    pub(crate) const CONVOLUTION_FORWARD: i32 = 10;
    pub(crate) const POINTWISE_OPERATION: i32 = 13;
    pub(crate) const GRAPH: i32 = 15;
    pub(crate) const VARIANT_PACK: i32 = 16;
    pub(crate) const TENSOR: i32 = 17;
    pub(crate) const PRODUCT: i32 = 18;
    pub(crate) const PRODUCT_OPERATION: i32 = 19;
    pub(crate) const REDUCTION: i32 = 21;
    pub(crate) const REDUCTION_OPERATION: i32 = 22;
    #[cfg(test)]
    pub(crate) const DEVICE_PROPERTIES: i32 = 38;
}

/// Attribute types, by cuDNN's numbering.
mod typed {
    pub(super) const HANDLE: i32 = 0;
    pub(super) const DATA_TYPE: i32 = 1;
    pub(super) const FLAG: i32 = 2;
    pub(super) const NUMBER: i32 = 3;
    pub(super) const FLOAT: i32 = 4;
    pub(super) const ADDRESS: i32 = 6;
    pub(super) const CONVOLUTION_MODE: i32 = 7;
    pub(super) const HEURISTIC_MODE: i32 = 8;
    pub(super) const NUMERICAL_NOTE: i32 = 11;
    pub(super) const POINTWISE_MODE: i32 = 14;
    pub(super) const DESCRIPTOR: i32 = 15;
    pub(super) const REDUCTION_OPERATOR: i32 = 18;
    pub(super) const TEXT: i32 = 24;
}

/// Maximum of numerical notes read from an engine.
const NOTES: usize = 32;

/// The value of an attribute.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    Handle(*mut c_void),
    DataType(i32),
    Flag(bool),
    Numbers(&'a [i64]),
    Float(f32),
    Addresses(&'a [*mut c_void]),
    ConvolutionMode(i32),
    HeuristicMode(i32),
    PointwiseMode(i32),
    ReductionOperator(i32),
    /// Each of them finalized.
    Descriptors(&'a [&'a Descriptor]),
    Text(&'a [u8]),
}

/// A descriptor, destroyed when it is dropped.
pub(super) struct Descriptor {
    library: &'static Library,
    raw: *mut c_void,
}

impl Descriptor {
    /// A new descriptor, not finalized.
    pub(super) fn new(library: &'static Library, kind: i32) -> Outcome<Descriptor> {
        let mut raw = ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let status = unsafe { (library.create_descriptor)(kind, &raw mut raw) };
        library.check(status, "cudnnBackendCreateDescriptor")?;
        Ok(Descriptor { library, raw })
    }

    /// A finalized descriptor with these attributes.
    pub(super) fn with(
        library: &'static Library,
        kind: i32,
        attributes: &[(i32, Value<'_>)],
    ) -> Outcome<Descriptor> {
        let descriptor = Descriptor::new(library, kind)?;
        for (attribute, value) in attributes {
            descriptor.set(*attribute, *value)?;
        }
        descriptor.finalise()?;
        Ok(descriptor)
    }

    pub(super) fn set(&self, attribute: i32, value: Value<'_>) -> Outcome<()> {
        let one = |kind, value: *const c_void| self.set_raw(attribute, kind, 1, value);
        match value {
            Value::Handle(handle) => one(typed::HANDLE, (&raw const handle).cast()),
            Value::DataType(number) => one(typed::DATA_TYPE, (&raw const number).cast()),
            Value::Flag(flag) => one(typed::FLAG, (&raw const flag).cast()),
            Value::Numbers(numbers) => {
                self.set_raw(attribute, typed::NUMBER, numbers.len(), numbers.as_ptr().cast())
            }
            Value::Float(number) => one(typed::FLOAT, (&raw const number).cast()),
            Value::Addresses(addresses) => self.set_raw(
                attribute,
                typed::ADDRESS,
                addresses.len(),
                addresses.as_ptr().cast(),
            ),
            Value::ConvolutionMode(mode) => one(typed::CONVOLUTION_MODE, (&raw const mode).cast()),
            Value::HeuristicMode(mode) => one(typed::HEURISTIC_MODE, (&raw const mode).cast()),
            Value::PointwiseMode(mode) => one(typed::POINTWISE_MODE, (&raw const mode).cast()),
            Value::ReductionOperator(operator) => {
                one(typed::REDUCTION_OPERATOR, (&raw const operator).cast())
            }
            Value::Descriptors(descriptors) => {
                let raw: Vec<_> = descriptors.iter().map(|descriptor| descriptor.raw).collect();
                self.set_raw(attribute, typed::DESCRIPTOR, raw.len(), raw.as_ptr().cast())
            }
            Value::Text(text) => self.set_raw(attribute, typed::TEXT, text.len(), text.as_ptr().cast()),
        }
    }

    fn set_raw(&self, attribute: i32, kind: i32, count: usize, values: *const c_void) -> Outcome<()> {
        // SAFETY: the descriptor is alive; there are `count` values of the attribute's element type (`Value`), which
        // are read before the call returns.
        let status = unsafe { (self.library.set_attribute)(self.raw, attribute, kind, count as i64, values) };
        self.library.check(status, "cudnnBackendSetAttribute")
    }

    /// Finalizes the descriptor. Unsupported configurations are often rejected here.
    pub(super) fn finalise(&self) -> Outcome<()> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.library.finalize)(self.raw) };
        self.library.check(status, "cudnnBackendFinalize")
    }

    /// A scalar attribute.
    pub(super) fn number(&self, attribute: i32) -> Outcome<i64> {
        let mut number = 0i64;
        self.get_raw(attribute, typed::NUMBER, 1, (&raw mut number).cast())?;
        Ok(number)
    }

    /// A text attribute.
    pub(super) fn text(&self, attribute: i32) -> Outcome<Vec<u8>> {
        let bytes = self.get_raw(attribute, typed::TEXT, 0, ptr::null_mut())?;
        let mut text = vec![0u8; bytes];
        let written = self.get_raw(attribute, typed::TEXT, bytes, text.as_mut_ptr().cast())?;
        text.truncate(written);
        Ok(text)
    }

    /// Number of descriptors in an attribute.
    pub(super) fn count(&self, attribute: i32) -> Outcome<usize> {
        self.get_raw(attribute, typed::DESCRIPTOR, 0, ptr::null_mut())
    }

    /// Reads an attribute into descriptors that are not finalized, and truncates the list to the number available.
    pub(super) fn fill(&self, attribute: i32, into: &mut Vec<Descriptor>) -> Outcome<()> {
        let mut raw: Vec<_> = into.iter().map(|descriptor| descriptor.raw).collect();
        let filled = self.get_raw(attribute, typed::DESCRIPTOR, raw.len(), raw.as_mut_ptr().cast())?;
        into.truncate(filled);
        Ok(())
    }

    /// An attribute that is a list of numerical notes.
    pub(super) fn notes(&self, attribute: i32) -> Outcome<Vec<i32>> {
        let mut notes = vec![0i32; NOTES];
        let count = self.get_raw(attribute, typed::NUMERICAL_NOTE, NOTES, notes.as_mut_ptr().cast())?;
        notes.truncate(count);
        Ok(notes)
    }

    /// Reads up to `room` values, and returns how many there are.
    fn get_raw(&self, attribute: i32, kind: i32, room: usize, values: *mut c_void) -> Outcome<usize> {
        let mut count = 0i64;
        // SAFETY: the descriptor is alive; `values` has a capacity of `room`, or is null if that is zero.
        let status = unsafe {
            (self.library.get_attribute)(self.raw, attribute, kind, room as i64, &raw mut count, values)
        };
        self.library.check(status, "cudnnBackendGetAttribute")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Executes this plan with a variant pack.
    pub(super) fn execute(&self, handle: *mut c_void, pack: &Descriptor) -> Outcome<()> {
        // SAFETY: handle, plan and pack are alive. The pack's addresses point to operands of the plan's shapes, as
        // callers of `Plan::run` ensure.
        let status = unsafe { (self.library.execute)(handle, self.raw, pack.raw) };
        self.library.check(status, "cudnnBackendExecute")
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // A failure cannot be handled: it leaks a few hundred bytes on the host.
        // SAFETY: it is alive, and destroyed once.
        let _ = unsafe { (self.library.destroy_descriptor)(self.raw) };
    }
}
