//! Reads a component's tensors: several threads, each with positional reads. The destination belongs to the card:
//! system memory here, pinned staging memory in `cuda`.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use candle_core::{DType, Tensor};
use residency::Bytes;

use crate::convert::{Numbers, Part, converts};
use crate::files::{FileStamp, open_regular};
use crate::format::{WeightFormat, rows_and_columns};
use crate::load::{LoadError, LoadPlan, LoadProgress, SourcePiece, Target, TensorSource};
use crate::quantize::{self, Nested, Parts, Scales};
use crate::tensors::{QuantizedWeight, Weight};

/// Bytes of one read by one thread: large enough to stream, small enough that a load can be cancelled within
/// milliseconds.
const CHUNK: u64 = 4 << 20;

/// Numbers that one thread quantizes at a time: few enough that they are still in the L2 cache when they are read
/// again.
const QUANTIZE_BATCH: usize = 128 << 10;

/// Progress is reported at least after this many bytes on the card.
const PROGRESS_EVERY: u64 = 32 << 20;

/// Maximum of reading threads: more only contend for the page cache.
const MAX_THREADS: usize = 16;

/// Progress callback; `Break` cancels the load.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(LoadProgress) -> ControlFlow<()>;

/// Unit of work of one thread, in system memory.
enum Task<'a> {
    /// Reads numbers to their final place.
    Read {
        part: Part<'a>,
        source: &'a TensorSource,
        read: Read<'a>,
    },
    /// Reads numbers and writes their codes and scales.
    Quantize(Quantize<'a>),
}

/// A chunk of a weight that is quantized at load.
struct Quantize<'a> {
    source: &'a TensorSource,
    format: WeightFormat,
    /// Unit size: numbers that share a scale.
    unit: usize,
    chunk: Chunk<'a>,
    codes: &'a mut [u8],
    scales: ScalesTo<'a>,
}

/// Destination of a chunk's scales.
enum ScalesTo<'a> {
    /// The final place of the bytes.
    Place(&'a mut [u8]),
    /// Collected per weight, and quantized by the thread that adds the last.
    Collected(Arc<Mutex<Collected<'a>>>),
}

/// Scales of a weight until they are quantized themselves.
struct Collected<'a> {
    /// Allocated with the first chunk: only few weights of a component are under way at a time.
    absmax: Vec<f32>,
    /// Final number of scales.
    blocks: usize,
    /// Chunks that are not done.
    left: usize,
    nested: Option<Nested<'a>>,
}

/// Buffers of a thread, reused from chunk to chunk.
#[derive(Default)]
struct Buffers {
    numbers: Vec<f32>,
    scales: Vec<f32>,
}

/// Granularity of a load. The result does not depend on it.
#[derive(Clone, Copy)]
struct Pace {
    threads: usize,
    /// Numbers quantized at a time.
    at_once: usize,
}

/// A run of numbers of one tensor, read at a time.
#[derive(Clone, Copy)]
pub(crate) struct Read<'a> {
    from: Origin<'a>,
    /// Index of its first number within the tensor.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // system memory is cut up in order
    pub(crate) first: usize,
    /// Count of numbers.
    pub(crate) count: usize,
}

/// The source of the bytes of a read.
#[derive(Clone, Copy)]
enum Origin<'a> {
    File { file: &'a OpenFile, offset: u64 },
    Inline(&'a [u8]),
}

impl<'a> Read<'a> {
    /// A part of this read: `count` numbers of `width` bytes, after the first `skipped`.
    pub(crate) fn part(&self, skipped: usize, count: usize, width: usize) -> Read<'a> {
        let from = match self.from {
            Origin::File { file, offset } => Origin::File {
                file,
                offset: offset + (skipped * width) as u64,
            },
            Origin::Inline(bytes) => Origin::Inline(&bytes[skipped * width..(skipped + count) * width]),
        };
        let first = self.first + skipped;
        Read { from, first, count }
    }
}

/// The dtype in which a target is read: bytes for a weight that is stored quantized.
pub(crate) fn read_as(target: Target) -> DType {
    match target {
        Target::Full(dtype) => dtype,
        Target::Quantized(_) => DType::U8,
    }
}

/// Splits a tensor into reads of at most `most` numbers, in order.
///
/// # Errors
/// [`LoadError::Unsupported`] if one of its files is not open.
pub(crate) fn reads<'a>(
    source: &'a TensorSource,
    files: &'a OpenFiles,
    most: usize,
) -> Result<Vec<Read<'a>>, LoadError> {
    let width = source.stored.width();
    let most = most.max(1);
    let (mut first, mut cuts) = (0, Vec::new());
    for piece in &source.pieces {
        let from = match piece {
            SourcePiece::File { file, range } => Origin::File {
                file: file_of(file, source, files)?,
                offset: range.offset,
            },
            SourcePiece::Inline(bytes) => Origin::Inline(bytes),
        };
        let count = piece.length() as usize / width;
        let whole = Read { from, first, count };
        let mut done = 0;
        while done < count {
            let next = most.min(count - done);
            cuts.push(whole.part(done, next, width));
            done += next;
        }
        first += count;
    }
    Ok(cuts)
}

/// A run of numbers quantized at a time: whole units of the format, possibly across pieces.
pub(crate) struct Chunk<'a> {
    /// Index of its first number within the tensor.
    pub(crate) first: usize,
    /// Count of numbers.
    pub(crate) count: usize,
    /// The reads that fill it, in order.
    pub(crate) reads: Vec<Read<'a>>,
}

/// Splits a tensor into chunks of whole units (but for the last), each of at most `most` numbers, or of one unit if
/// that is larger.
///
/// # Errors
/// [`LoadError::Unsupported`] if one of its files is not open.
pub(crate) fn chunks<'a>(
    source: &'a TensorSource,
    files: &'a OpenFiles,
    unit: usize,
    most: usize,
) -> Result<Vec<Chunk<'a>>, LoadError> {
    let unit = unit.max(1);
    let size = (most / unit).max(1) * unit;
    let width = source.stored.width();
    let mut chunks: Vec<Chunk<'a>> = Vec::new();
    for whole in reads(source, files, usize::MAX)? {
        let mut done = 0;
        while done < whole.count {
            let first = whole.first + done;
            let count = (whole.count - done).min(size - first % size);
            let read = whole.part(done, count, width);
            match chunks.last_mut() {
                Some(chunk) if first % size != 0 => {
                    chunk.count += count;
                    chunk.reads.push(read);
                }
                _ => chunks.push(Chunk {
                    first,
                    count,
                    reads: vec![read],
                }),
            }
            done += count;
        }
    }
    Ok(chunks)
}

/// A checkpoint file that is being read.
#[derive(Debug)]
pub(crate) struct OpenFile {
    path: Arc<Path>,
    file: File,
    stamp: FileStamp,
}

/// The files of a load, by path.
pub(crate) type OpenFiles = HashMap<Arc<Path>, OpenFile>;

/// Reads all tensors. Calls `progress` on this thread: with zero at the start, at least every 64 MiB on the card, and
/// at the end.
///
/// # Errors
/// As [`crate::Gpu::load`]; nothing is kept then.
pub(crate) fn read_tensors(
    sources: &[TensorSource],
    progress: Progress<'_>,
) -> Result<HashMap<String, Weight>, LoadError> {
    let files = open(sources)?;
    let total: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
    report_progress(progress, Bytes::ZERO, total)?;

    let numbers = read_numbers(sources, &files, progress)?;
    check_unchanged(&files)?;

    let mut tensors = HashMap::with_capacity(sources.len());
    for (source, numbers) in sources.iter().zip(numbers) {
        let tensor = numbers
            .into_tensor(&source.shape_on_card())
            .map_err(|e| LoadError::Unsupported(format!("tensor {}: {e}", source.name)))?;
        tensors.insert(source.name.clone(), weight_of(source, tensor));
    }
    report_progress(progress, total, total)?;
    Ok(tensors)
}

/// The numbers of sources whose files are open, in order. Reports progress in between.
///
/// # Errors
/// As [`crate::Gpu::load`].
pub(crate) fn read_numbers(
    sources: &[TensorSource],
    files: &OpenFiles,
    progress: Progress<'_>,
) -> Result<Vec<Numbers>, LoadError> {
    let pace = Pace {
        threads: threads(),
        at_once: QUANTIZE_BATCH,
    };
    read_at_pace(sources, files, pace, progress)
}

fn read_at_pace(
    sources: &[TensorSource],
    files: &OpenFiles,
    pace: Pace,
    progress: Progress<'_>,
) -> Result<Vec<Numbers>, LoadError> {
    let total = sources.iter().map(TensorSource::bytes_on_card).sum();
    let mut numbers = Vec::with_capacity(sources.len());
    for source in sources {
        let dtype = read_as(source.target);
        let count = source.bytes_on_card().0 as usize / dtype.size_in_bytes();
        numbers.push(Numbers::zeroed(dtype, count).ok_or_else(|| no_conversion(source))?);
    }
    let tasks = tasks(sources, &mut numbers, files, pace.at_once)?;
    let worker = |_| {
        let mut buffers = Buffers::default();
        move |task: Task<'_>| carry_out(task, &mut buffers)
    };
    let threads = start_threads(pace.threads)?;
    let workers = (0..pace.threads).map(worker);
    run(&threads, tasks.into_iter(), workers, total, progress)?;
    Ok(numbers)
}

/// The weight that a source describes, from its numbers.
pub(crate) fn weight_of(source: &TensorSource, tensor: Tensor) -> Weight {
    match source.target {
        Target::Full(_) => Weight::Full(tensor),
        Target::Quantized(format) => Weight::Quantized(QuantizedWeight {
            bytes: tensor,
            format,
            shape: source.shape.clone(),
        }),
    }
}

/// Reports progress; an error if the caller cancels.
pub(crate) fn report_progress(progress: Progress<'_>, done: Bytes, total: Bytes) -> Result<(), LoadError> {
    match progress(LoadProgress { done, total }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(LoadError::Cancelled),
    }
}

/// Opens the files of all sources, and validates every source before anything is allocated.
///
/// # Errors
/// As [`crate::Gpu::load`].
pub(crate) fn open(sources: &[TensorSource]) -> Result<OpenFiles, LoadError> {
    let files = open_files(sources)?;
    check(sources, &files)?;
    Ok(files)
}

/// A file of a source.
fn file_of<'a>(
    file: &Arc<Path>,
    source: &TensorSource,
    files: &'a OpenFiles,
) -> Result<&'a OpenFile, LoadError> {
    files
        .get(file)
        .ok_or_else(|| LoadError::Unsupported(format!("tensor {} has no file", source.name)))
}

/// The plan of a loaded component, with the versions of its files.
pub(crate) struct LoadedFrom {
    pub(crate) plan: LoadPlan,
    stamps: HashMap<Arc<Path>, FileStamp>,
}

impl LoadedFrom {
    /// A plan, with the versions of its open files.
    pub(crate) fn new(plan: &LoadPlan, files: &OpenFiles) -> LoadedFrom {
        let stamps = files.iter().map(|(path, open)| (Arc::clone(path), open.stamp));
        LoadedFrom {
            plan: plan.clone(),
            stamps: stamps.collect(),
        }
    }

    /// A plan without files, or one whose component is loaded whole: nothing more is read of it.
    pub(crate) fn whole(plan: &LoadPlan) -> LoadedFrom {
        LoadedFrom {
            plan: plan.clone(),
            stamps: HashMap::new(),
        }
    }

    #[cfg(feature = "cuda")]
    /// Whether it was loaded by this plan from these versions of its files.
    pub(crate) fn is_of(&self, plan: &LoadPlan, files: &OpenFiles) -> bool {
        let mut all = files.iter();
        self.plan == *plan && all.all(|(path, open)| self.stamps.get(path) == Some(&open.stamp))
    }

    /// Checks that open files are the versions that the component was loaded from.
    ///
    /// # Errors
    /// [`LoadError::Damaged`] for the first that is another.
    pub(crate) fn check_versions(&self, files: &OpenFiles) -> Result<(), LoadError> {
        for (path, open) in files {
            if self.stamps.get(path).is_some_and(|stamp| *stamp != open.stamp) {
                let problem = "it was replaced since the component was loaded".to_owned();
                return Err(damaged(path, problem));
            }
        }
        Ok(())
    }
}

/// Checks that the files are unchanged since they were opened; otherwise the bytes read are worthless.
///
/// # Errors
/// [`LoadError::Damaged`] or [`LoadError::Io`].
pub(crate) fn check_unchanged(files: &OpenFiles) -> Result<(), LoadError> {
    for open in files.values() {
        let now = FileStamp::of(&open.file).map_err(|e| io(&open.path, e))?;
        if now != open.stamp {
            return Err(damaged(&open.path, "it changed while it was read".to_owned()));
        }
    }
    Ok(())
}

fn open_files(sources: &[TensorSource]) -> Result<OpenFiles, LoadError> {
    let mut files = OpenFiles::new();
    for path in sources.iter().flat_map(TensorSource::files) {
        if !files.contains_key(path) {
            let path = Arc::clone(path);
            let file = open_regular(&path).map_err(|e| io(&path, e))?;
            let stamp = FileStamp::of(&file).map_err(|e| io(&path, e))?;
            files.insert(Arc::clone(&path), OpenFile { path, file, stamp });
        }
    }
    Ok(files)
}

/// Validates every source before anything is allocated.
fn check(sources: &[TensorSource], files: &OpenFiles) -> Result<(), LoadError> {
    let mut names = std::collections::HashSet::new();
    for source in sources {
        let refuse = |problem: &str| LoadError::Unsupported(format!("tensor {} {problem}", source.name));
        if !names.insert(source.name.as_str()) {
            return Err(refuse("is named twice in one component"));
        }
        let dtype = read_as(source.target);
        if !source.is_made_at_load() && !converts(source.stored, dtype)
            || source.is_made_at_load() && !source.stored.is_float()
        {
            return Err(no_conversion(source));
        }
        let width = source.stored.width() as u64;
        let numbers = source
            .shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n as u64))
            .and_then(|n| n.checked_mul(width.max(dtype.size_in_bytes() as u64)).map(|_| n))
            .ok_or_else(|| refuse("has an impossible shape"))?;
        let needed = match source.target {
            Target::Quantized(format) => {
                let (_, columns) = rows_and_columns(&source.shape);
                if !format.fits(columns) {
                    return Err(refuse(&format!(
                        "has rows of {columns}, which {format} cannot hold"
                    )));
                }
                match source.is_made_at_load() {
                    true => numbers * width,
                    false => source.bytes_on_card().0,
                }
            }
            Target::Full(_) => numbers * width,
        };
        let mut given = 0u64;
        for piece in &source.pieces {
            if piece.length() % width != 0 {
                return Err(refuse("has a range that cuts a number apart"));
            }
            if let SourcePiece::File { file, range } = piece {
                let end = range
                    .offset
                    .checked_add(range.length)
                    .ok_or_else(|| refuse("ends nowhere"))?;
                let length = files.get(file).map_or(0, |f| f.stamp.size);
                if end > length {
                    let (name, behind) = (&source.name, end - length);
                    let problem = format!("tensor {name} ends {behind} bytes behind the end of the file");
                    return Err(damaged(file, problem));
                }
            }
            given = given
                .checked_add(piece.length())
                .ok_or_else(|| refuse("ends nowhere"))?;
        }
        if given != needed {
            return Err(refuse(&format!(
                "has {given} bytes in the file and needs {needed}"
            )));
        }
    }
    Ok(())
}

/// Splits all tensors into tasks, in the order of the plan.
fn tasks<'a>(
    sources: &'a [TensorSource],
    numbers: &'a mut [Numbers],
    files: &'a OpenFiles,
    at_once: usize,
) -> Result<Vec<Task<'a>>, LoadError> {
    let mut tasks = Vec::new();
    for (source, numbers) in sources.iter().zip(numbers) {
        match (source.target, numbers.part()) {
            (Target::Quantized(format), Part::U8(bytes)) if source.is_made_at_load() => {
                quantize_tasks(&mut tasks, source, format, bytes, files, at_once)?;
            }
            (_, mut rest) => {
                for read in reads(source, files, CHUNK as usize / source.stored.width())? {
                    let (part, behind) = rest.split(read.count);
                    rest = behind;
                    tasks.push(Task::Read { part, source, read });
                }
            }
        }
    }
    Ok(tasks)
}

/// Splits a weight that is quantized at load into tasks, each with its own destination.
fn quantize_tasks<'a>(
    tasks: &mut Vec<Task<'a>>,
    source: &'a TensorSource,
    format: WeightFormat,
    bytes: &'a mut [u8],
    files: &'a OpenFiles,
    at_once: usize,
) -> Result<(), LoadError> {
    let (rows, columns) = rows_and_columns(&source.shape);
    let unit = quantize::unit(format, columns).ok_or_else(|| no_conversion(source))?;
    let chunks = chunks(source, files, unit, at_once)?;
    let Parts { scales, mut codes } = Parts::of(bytes, format, rows, columns);
    let (mut places, collected): (&mut [u8], _) = match scales {
        Scales::Plain(places) => (places, None),
        Scales::Nested(nested) if chunks.is_empty() => {
            nested.fill(Vec::new());
            return Ok(());
        }
        Scales::Nested(nested) => {
            let collected = Collected {
                absmax: Vec::new(),
                blocks: (rows * columns).div_ceil(unit),
                left: chunks.len(),
                nested: Some(nested),
            };
            (&mut [], Some(Arc::new(Mutex::new(collected))))
        }
    };
    for chunk in chunks {
        let (own_codes, behind) = codes.split_at_mut(quantize::code_bytes(format, chunk.count));
        codes = behind;
        let scales = match &collected {
            Some(collected) => ScalesTo::Collected(Arc::clone(collected)),
            None => {
                let (own, behind) = places.split_at_mut(4 * chunk.count.div_ceil(unit));
                places = behind;
                ScalesTo::Place(own)
            }
        };
        tasks.push(Task::Quantize(Quantize {
            source,
            format,
            unit,
            chunk,
            codes: own_codes,
            scales,
        }));
    }
    Ok(())
}

/// Number of threads that read a component.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
}

/// Threads to read with. They are our own: candle may keep those of rayon's common pool busy, and a caller that runs there would wait
/// for itself.
///
/// # Errors
/// [`LoadError::Lost`] if the system has no thread.
pub(crate) fn start_threads(count: usize) -> Result<rayon::ThreadPool, LoadError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(count.max(1));
    threads
        .thread_name(|_| "moored-read".to_owned())
        .build()
        .map_err(|error| LoadError::Lost(format!("no thread can be started to read with: {error}")))
}

/// Runs tasks, in order, on a thread for each worker, while the calling thread, which is none of them, reports progress. A worker
/// returns the bytes on the card that its task completed; all workers have ended when this returns.
///
/// # Errors
/// The first error of a worker or of `progress`.
pub(crate) fn run<T, W>(
    threads: &rayon::ThreadPool,
    tasks: impl Iterator<Item = T> + Send,
    workers: impl IntoIterator<Item = W>,
    total: Bytes,
    progress: Progress<'_>,
) -> Result<(), LoadError>
where
    T: Send,
    W: FnMut(T) -> Result<u64, LoadError> + Send,
{
    let queue = Mutex::new(tasks);
    let stop = AtomicBool::new(false);
    let (send_done, done_parts) = mpsc::channel::<Result<u64, LoadError>>();

    let work = |mut worker: W, send_done: mpsc::Sender<Result<u64, LoadError>>| {
        while !stop.load(Relaxed) {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(task) = next else { break };
            // After an error the receiver is gone: the flag ends this loop.
            let _ = send_done.send(worker(task));
        }
    };

    threads.in_place_scope(|scope| {
        for worker in workers {
            let send_done = send_done.clone();
            let work = &work;
            scope.spawn(move |_| work(worker, send_done));
        }
        drop(send_done);

        let (mut done, mut reported) = (0, 0);
        let outcome = done_parts.iter().try_for_each(|part| {
            done += part?;
            if done - reported >= PROGRESS_EVERY && done < total.0 {
                reported = done;
                report_progress(progress, Bytes(done), total)?;
            }
            Ok(())
        });
        stop.store(true, Relaxed);
        outcome
    })
}

fn carry_out(task: Task<'_>, buffers: &mut Buffers) -> Result<u64, LoadError> {
    match task {
        Task::Read { part, source, read } => {
            read_part(part, source, &read)?;
            Ok((read.count * read_as(source.target).size_in_bytes()) as u64)
        }
        Task::Quantize(task) => task.carry_out(buffers),
    }
}

impl Quantize<'_> {
    /// Returns the bytes on the card that are done.
    fn carry_out(self, buffers: &mut Buffers) -> Result<u64, LoadError> {
        let Chunk { first, count, reads } = self.chunk;
        buffers.numbers.resize(count, 0.0);
        let mut rest = buffers.numbers.as_mut_slice();
        for read in &reads {
            let (part, behind) = rest.split_at_mut(read.count);
            rest = behind;
            read_part(Part::F32(part), self.source, read)?;
        }
        let scales = &mut buffers.scales;
        scales.resize(count.div_ceil(self.unit), 0.0);
        quantize::make_codes(self.format, self.unit, &buffers.numbers, scales, self.codes).map_err(|_| {
            LoadError::NotFinite {
                tensor: self.source.name.clone(),
            }
        })?;
        let scale_bytes = match self.scales {
            ScalesTo::Place(place) => {
                quantize::write_f32s(place, scales);
                place.len()
            }
            ScalesTo::Collected(collected) => {
                let last = {
                    let mut collected = collected.lock().unwrap_or_else(PoisonError::into_inner);
                    collected.take(first / self.unit, scales)
                };
                if let Some((nested, absmax)) = last {
                    nested.fill(absmax);
                }
                scales.len()
            }
        };
        Ok((self.codes.len() + scale_bytes) as u64)
    }
}

impl<'a> Collected<'a> {
    /// Adds the scales from block `first` on. The last call returns all of them and their destination.
    fn take(&mut self, first: usize, scales: &[f32]) -> Option<(Nested<'a>, Vec<f32>)> {
        self.absmax.resize(self.blocks, 0.0);
        self.absmax[first..first + scales.len()].copy_from_slice(scales);
        self.left -= 1;
        let nested = (self.left == 0).then(|| self.nested.take()).flatten()?;
        Some((nested, std::mem::take(&mut self.absmax)))
    }
}

/// Fills a slice with the numbers of a read of the same length.
///
/// # Errors
/// [`LoadError::Damaged`] if the file ends early, [`LoadError::Io`] otherwise.
pub(crate) fn read_part(part: Part<'_>, source: &TensorSource, read: &Read<'_>) -> Result<(), LoadError> {
    let (file, offset) = match read.from {
        Origin::File { file, offset } => (file, offset),
        Origin::Inline(bytes) => {
            return match part {
                // Of a quantized weight: bytes in the layout of its format.
                Part::U8(to) => {
                    to.copy_from_slice(bytes);
                    Ok(())
                }
                part => part
                    .read(bytes, 0, source.stored)
                    .map_err(|_| no_conversion(source)),
            };
        }
    };
    match part.read(&file.file, offset, source.stored) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(damaged(
            &file.path,
            format!("it ended inside tensor {}", source.name),
        )),
        Err(error) => Err(io(&file.path, error)),
    }
}

fn no_conversion(source: &TensorSource) -> LoadError {
    LoadError::Unsupported(format!(
        "tensor {}, stored as {:?}, is not read as {:?}",
        source.name, source.stored, source.target
    ))
}

fn io(path: &Path, source: std::io::Error) -> LoadError {
    LoadError::Io {
        file: path.to_owned(),
        source,
    }
}

fn damaged(path: &Path, problem: String) -> LoadError {
    LoadError::Damaged {
        file: path.to_owned(),
        problem,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    use half::bf16;
    use proptest::prelude::*;

    use crate::load::{ByteRange, Stored};

    fn pieces(file: &Arc<Path>, length: usize, width: usize, cuts: &[usize]) -> Vec<SourcePiece> {
        let numbers = length / width;
        let mut ends: Vec<usize> = cuts.iter().map(|c| c % (numbers + 1) * width).collect();
        ends.push(length);
        ends.sort_unstable();
        let mut begin = 0;
        let piece = |end: usize| {
            let range = ByteRange {
                offset: begin as u64,
                length: (end - begin) as u64,
            };
            begin = end;
            let file = Arc::clone(file);
            SourcePiece::File { file, range }
        };
        ends.into_iter().map(piece).collect()
    }

    proptest! {
        #[test]
        fn threads_chunks_and_pieces_do_not_change_the_result(
            (rows, columns) in (0usize..9, prop_oneof![0usize..200, 4000usize..5000]),
            seed in any::<u32>(),
            cuts in proptest::collection::vec(any::<usize>(), 0..4),
            threads in 1usize..5,
            at_once in prop_oneof![1usize..300, Just(QUANTIZE_BATCH)],
        ) {
            let next = |i: usize| {
                let bits = (i as u32).wrapping_mul(2_654_435_761) ^ seed;
                bf16::from_f32((bits.wrapping_mul(bits | 1) as i32) as f32 * 1e-9)
            };
            let numbers: Vec<bf16> = (0..rows * columns).map(next).collect();
            let wide: Vec<f32> = numbers.iter().map(|x| x.to_f32()).collect();
            for (stored, bytes) in [
                (Stored::Bf16, numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
                (Stored::F32, wide.iter().flat_map(|x| x.to_le_bytes()).collect()),
                (Stored::F64, wide.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect()),
            ] {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), &bytes).unwrap();
                let path: Arc<Path> = file.path().into();
                let sources: Vec<TensorSource> = WeightFormat::MADE_AT_LOAD.iter().map(|format| TensorSource {
                    name: format.to_string(),
                    pieces: pieces(&path, bytes.len(), stored.width(), &cuts),
                    stored,
                    shape: vec![rows, columns],
                    target: Target::Quantized(format.for_columns(columns)),
                    block: None,
                }).collect();
                let files = open(&sources).unwrap();
                let pace = Pace { threads, at_once };
                let total: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
                let made = read_at_pace(&sources, &files, pace, &mut |p| {
                    assert!(p.done <= p.total && p.total == total);
                    ControlFlow::Continue(())
                }).unwrap();
                for (format, made) in WeightFormat::MADE_AT_LOAD.into_iter().zip(made) {
                    let format = format.for_columns(columns);
                    let expected = quantize::quantize(format, &wide, rows, columns).unwrap();
                    prop_assert_eq!(made.bytes(), expected, "{} {:?}", format, stored);
                }
            }
        }
    }

    #[test]
    fn numbers_in_bytes_are_converted_as_those_of_a_file() {
        let numbers = [1.5_f32, -2.0, 0.0, 3.0e38];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut narrow = [bf16::ZERO; 3];
        let part = Part::Bf16(&mut narrow);
        part.read(bytes.as_slice(), 4, Stored::F32).unwrap();
        assert_eq!(narrow, [-2.0, 0.0, 3.0e38].map(bf16::from_f32));
        let mut same = [0.0; 4];
        let part = Part::F32(&mut same);
        part.read(bytes.as_slice(), 0, Stored::F32).unwrap();
        assert_eq!(same, numbers);
        let short = Part::F32(&mut same)
            .read(&bytes[..15], 0, Stored::F32)
            .unwrap_err();
        assert_eq!(short.kind(), std::io::ErrorKind::UnexpectedEof);
    }
}
