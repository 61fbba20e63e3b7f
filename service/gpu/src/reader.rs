//! Reads a component's tensors: several threads, each with positional reads of its own. What they read into is the
//! card's: system memory here, pinned memory on its way to a GPU in `cuda`.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use candle_core::Tensor;
use residency::Bytes;

use crate::checkpoint::FileStamp;
use crate::convert::{Numbers, Part, converts};
use crate::load::{LoadError, LoadProgress, TensorSource};

/// Bytes of a file that one thread reads at a time: large enough to stream, small enough that a cancelled
/// load ends in milliseconds.
const CHUNK: u64 = 4 << 20;

/// Progress is told after so many bytes on the card, at the latest.
const PROGRESS_EVERY: u64 = 32 << 20;

/// More threads than this only contend for the page cache.
const MOST_THREADS: usize = 16;

/// What a caller hears of progress through, and answers.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(LoadProgress) -> ControlFlow<()>;

/// One read of one thread into system memory.
struct Task<'a> {
    part: Part<'a>,
    source: &'a TensorSource,
    file: &'a OpenFile,
    offset: u64,
}

/// A run of numbers of one tensor that is read at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    /// Where it begins in the file.
    pub(crate) offset: u64,
    /// Its first number, counted within the tensor.
    pub(crate) first: usize,
    /// How many numbers it has.
    pub(crate) count: usize,
}

/// Cuts a tensor into reads of at most so many numbers, in order.
pub(crate) fn reads(source: &TensorSource, most: usize) -> Vec<Read> {
    let width = source.stored.width() as u64;
    let most = most.max(1);
    let (mut first, mut cuts) = (0, Vec::new());
    for range in &source.ranges {
        let (mut offset, mut left) = (range.offset, (range.length / width) as usize);
        while left > 0 {
            let count = most.min(left);
            cuts.push(Read { offset, first, count });
            (offset, first, left) = (offset + count as u64 * width, first + count, left - count);
        }
    }
    cuts
}

/// A checkpoint file that is being read.
pub(crate) struct OpenFile {
    path: Arc<Path>,
    file: File,
    stamp: FileStamp,
}

/// The files of a load, by path.
pub(crate) type OpenFiles = HashMap<Arc<Path>, OpenFile>;

/// Reads all tensors. `progress` is told on this thread: with nothing at the start, at least every 64 MiB on
/// the card, and at the end.
///
/// # Errors
/// As [`crate::Gpu::load`]; nothing is kept then.
pub(crate) fn read_tensors(
    sources: &[TensorSource],
    progress: Progress<'_>,
) -> Result<HashMap<String, Tensor>, LoadError> {
    let files = open(sources)?;
    let total: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
    tell(progress, Bytes::ZERO, total)?;

    let mut numbers = Vec::with_capacity(sources.len());
    for source in sources {
        let count = source.shape.iter().product();
        numbers.push(Numbers::zeroed(source.target, count).ok_or_else(|| no_conversion(source))?);
    }
    let tasks = tasks(sources, &mut numbers, &files)?;
    let workers = (0..threads()).map(|_| carry_out);
    run(tasks.into_iter(), workers, total, progress)?;
    check_unchanged(&files)?;

    let mut tensors = HashMap::with_capacity(sources.len());
    for (source, numbers) in sources.iter().zip(numbers) {
        let tensor = numbers
            .into_tensor(&source.shape)
            .map_err(|e| LoadError::Unsupported(format!("tensor {}: {e}", source.name)))?;
        tensors.insert(source.name.clone(), tensor);
    }
    tell(progress, total, total)?;
    Ok(tensors)
}

/// Tells progress, and hears whether to go on.
pub(crate) fn tell(progress: Progress<'_>, done: Bytes, total: Bytes) -> Result<(), LoadError> {
    match progress(LoadProgress { done, total }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(LoadError::Cancelled),
    }
}

/// Opens the files of all sources, and checks every source against them before anything is allocated for one.
///
/// # Errors
/// As [`crate::Gpu::load`].
pub(crate) fn open(sources: &[TensorSource]) -> Result<OpenFiles, LoadError> {
    let files = open_files(sources)?;
    check(sources, &files)?;
    Ok(files)
}

/// The file of a source.
///
/// # Errors
/// [`LoadError::Unsupported`], if it was not among those that were opened.
pub(crate) fn file_of<'a>(source: &TensorSource, files: &'a OpenFiles) -> Result<&'a OpenFile, LoadError> {
    files
        .get(&source.file)
        .ok_or_else(|| LoadError::Unsupported(format!("tensor {} has no file", source.name)))
}

/// Whether the files are what they were when they were opened: what was read is worth nothing otherwise.
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
    for source in sources {
        if !files.contains_key(&source.file) {
            let path = Arc::clone(&source.file);
            let file = File::open(&path).map_err(|e| io(&path, e))?;
            let stamp = FileStamp::of(&file).map_err(|e| io(&path, e))?;
            files.insert(Arc::clone(&path), OpenFile { path, file, stamp });
        }
    }
    Ok(files)
}

/// Checks every source before anything is allocated for one.
fn check(sources: &[TensorSource], files: &OpenFiles) -> Result<(), LoadError> {
    let mut names = std::collections::HashSet::new();
    for source in sources {
        let refuse = |problem: &str| LoadError::Unsupported(format!("tensor {} {problem}", source.name));
        if !names.insert(source.name.as_str()) {
            return Err(refuse("is named twice in one component"));
        }
        if !converts(source.stored, source.target) {
            return Err(no_conversion(source));
        }
        let width = source.stored.width() as u64;
        let in_shape = source
            .shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n as u64))
            .and_then(|n| n.checked_mul(width))
            .ok_or_else(|| refuse("has an impossible shape"))?;
        let mut in_ranges = 0u64;
        for range in &source.ranges {
            if range.length % width != 0 {
                return Err(refuse("has a range that cuts a number apart"));
            }
            let end = range
                .offset
                .checked_add(range.length)
                .ok_or_else(|| refuse("ends nowhere"))?;
            let length = files.get(&source.file).map_or(0, |f| f.stamp.length);
            if end > length {
                return Err(damaged(
                    &source.file,
                    format!(
                        "tensor {} ends {} bytes behind the end of the file",
                        source.name,
                        end - length
                    ),
                ));
            }
            in_ranges = in_ranges
                .checked_add(range.length)
                .ok_or_else(|| refuse("ends nowhere"))?;
        }
        if in_ranges != in_shape {
            return Err(refuse(&format!(
                "has {in_ranges} bytes in the file and needs {in_shape}"
            )));
        }
    }
    Ok(())
}

/// Cuts all tensors into reads, in the order of the plan.
fn tasks<'a>(
    sources: &'a [TensorSource],
    numbers: &'a mut [Numbers],
    files: &'a OpenFiles,
) -> Result<Vec<Task<'a>>, LoadError> {
    let mut tasks = Vec::new();
    for (source, numbers) in sources.iter().zip(numbers) {
        let file = file_of(source, files)?;
        let mut rest = numbers.part();
        for read in reads(source, CHUNK as usize / source.stored.width()) {
            let (part, behind) = rest.split(read.count);
            rest = behind;
            tasks.push(Task {
                part,
                source,
                file,
                offset: read.offset,
            });
        }
    }
    Ok(tasks)
}

/// How many threads read a component.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MOST_THREADS)
}

/// Carries out tasks, in their order, on a thread for each worker, while this one tells progress. A worker answers with
/// the bytes on the card that are done; when this returns, all workers have ended.
///
/// # Errors
/// The first of a worker's, or that of `progress`.
pub(crate) fn run<T, W>(
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
    let (tell_done, done_parts) = mpsc::channel::<Result<u64, LoadError>>();

    // Threads of their own rather than rayon's: candle may be busy in that pool, and a caller that runs in it
    // would wait for itself.
    let work = |mut worker: W, tell_done: mpsc::Sender<Result<u64, LoadError>>| {
        while !stop.load(Relaxed) {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(task) = next else { break };
            // Nobody listens any more after an error: the flag ends this loop.
            let _ = tell_done.send(worker(task));
        }
    };

    std::thread::scope(|scope| {
        let mut started = 0;
        for worker in workers {
            let tell_done = tell_done.clone();
            let work = &work;
            let thread = std::thread::Builder::new().name("moored-read".to_owned());
            match thread.spawn_scoped(scope, move || work(worker, tell_done)) {
                Ok(_) => started += 1,
                Err(error) if started == 0 => {
                    return Err(LoadError::Lost(format!(
                        "no thread can be started to read with: {error}"
                    )));
                }
                // Fewer threads read as well, only slower.
                Err(_) => break,
            }
        }
        drop(tell_done);

        let (mut done, mut told) = (0, 0);
        let outcome = done_parts.iter().try_for_each(|part| {
            done += part?;
            if done - told >= PROGRESS_EVERY && done < total.0 {
                told = done;
                tell(progress, Bytes(done), total)?;
            }
            Ok(())
        });
        stop.store(true, Relaxed);
        outcome
    })
}

fn carry_out(task: Task<'_>) -> Result<u64, LoadError> {
    let numbers = task.part.len();
    let Task {
        part,
        source,
        file,
        offset,
    } = task;
    read_part(part, source, file, offset)?;
    Ok((numbers * source.target.size_in_bytes()) as u64)
}

/// Fills a part of a source with the numbers that begin at `offset` of its file.
///
/// # Errors
/// [`LoadError::Damaged`] where the file ends early, [`LoadError::Io`] else.
pub(crate) fn read_part(
    part: Part<'_>,
    source: &TensorSource,
    file: &OpenFile,
    offset: u64,
) -> Result<(), LoadError> {
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
