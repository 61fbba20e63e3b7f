//! How the blocks of [`crate::arriving`] are read to a card: by the lanes, whose copies a stream of its own follows.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use residency::Bytes;

use super::staging::{Follows, lost};
use super::streaming::{FileSource, ReadTo};
use crate::arriving::{self, ReadsBlocks, Told};
use crate::blocks::BlockPlace;
use crate::load::LoadError;
use crate::reader;

/// Tensors of blocks that have a place and are not there yet.
pub(super) type Unread = arriving::Unread<Vec<ReadTo>>;

/// The blocks of one component that are still to come.
pub(super) type Arriving = arriving::Arriving<ReadByLanes>;

/// Reads blocks from the files of a component, by the lanes of the card.
pub(super) struct ReadByLanes {
    files: Arc<FileSource>,
    /// Waits for the copies of all lanes, in the order in which they are queued.
    copies: Arc<CudaStream>,
}

/// These blocks, of which nothing is read yet.
pub(super) fn of_unread(
    context: &Arc<CudaContext>,
    unread: Unread,
    files: Arc<FileSource>,
) -> Result<Arriving, LoadError> {
    let copies = context.new_stream().map_err(lost)?;
    let block = |(place, tensors)| Ok((place, tensors, context.new_event(None).map_err(lost)?));
    let blocks = unread.into_iter().map(block);
    let blocks = blocks.collect::<Result<Vec<_>, LoadError>>()?;
    Ok(Arriving::new(ReadByLanes { files, copies }, blocks))
}

impl ReadsBlocks for ReadByLanes {
    type Block = Vec<ReadTo>;
    type Event = CudaEvent;
    type Stream = CudaStream;

    fn bytes(&self, block: &Vec<ReadTo>) -> Bytes {
        block.iter().map(|tensor| tensor.source.bytes_on_card()).sum()
    }

    fn read(
        &self,
        blocks: &Unread,
        told: Told<'_>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let named = blocks.iter().flat_map(|(place, tensors)| {
            let names = tensors.iter().map(|tensor| tensor.source.name.as_str());
            names.map(|name| (name, *place))
        });
        let following = Following {
            block_of: named.collect(),
            copies: &self.copies,
            told,
        };
        let tensors: Vec<&ReadTo> = blocks.values().flatten().collect();
        self.files.read_with(&tensors, &following, &mut |_| go_on())
    }

    fn check(&self) -> Result<(), LoadError> {
        reader::check_unchanged(&self.files.files)
    }

    fn record(&self, event: &CudaEvent) -> Result<(), LoadError> {
        event.record(&self.copies).map_err(lost)
    }

    fn wait(&self, then: &CudaStream, event: &CudaEvent) -> Result<(), LoadError> {
        then.wait(event).map_err(lost)
    }

    fn settle(&self) -> Result<(), LoadError> {
        self.copies.synchronize().map_err(lost)
    }
}

/// Has a stream wait for what lanes queue, and tells to which blocks it belongs.
struct Following<'a> {
    /// The block of each tensor, by name.
    block_of: HashMap<&'a str, BlockPlace>,
    copies: &'a CudaStream,
    told: Told<'a>,
}

impl Follows for Following<'_> {
    fn queued(&self, pieces: &[(&str, u64)], before: &CudaEvent) -> Result<(), LoadError> {
        let of_piece = |(tensor, bytes): &(&str, u64)| Some((*self.block_of.get(tensor)?, Bytes(*bytes)));
        let parts: Vec<(BlockPlace, Bytes)> = pieces.iter().filter_map(of_piece).collect();
        (self.told)(&|| self.copies.wait(before).map_err(lost), &parts)
    }
}
