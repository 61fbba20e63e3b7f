//! Reads a component's tensors into system memory: several threads, each with positional reads of its own.

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

/// One read of one thread.
struct Task<'a> {
    part: Part<'a>,
    source: &'a TensorSource,
    file: &'a OpenFile,
    offset: u64,
    bytes_on_card: u64,
}

struct OpenFile {
    path: Arc<Path>,
    file: File,
    stamp: FileStamp,
}

/// Reads all tensors. `progress` is told on this thread: with nothing at the start, at least every 64 MiB on
/// the card, and at the end.
///
/// # Errors
/// As [`crate::Gpu::load`]; nothing is kept then.
pub(crate) fn read_tensors(
    sources: &[TensorSource],
    progress: Progress<'_>,
) -> Result<HashMap<String, Tensor>, LoadError> {
    let files = open_files(sources)?;
    check(sources, &files)?;
    let total: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
    tell(progress, Bytes::ZERO, total)?;

    let mut numbers = Vec::with_capacity(sources.len());
    for source in sources {
        let count = source.shape.iter().product();
        numbers.push(Numbers::zeroed(source.target, count).ok_or_else(|| no_conversion(source))?);
    }
    let tasks = tasks(sources, &mut numbers, &files)?;
    run(tasks, total, progress)?;

    for open in files.values() {
        let now = FileStamp::of(&open.file).map_err(|e| io(&open.path, e))?;
        if now != open.stamp {
            return Err(damaged(&open.path, "it changed while it was read".to_owned()));
        }
    }
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

fn tell(progress: Progress<'_>, done: Bytes, total: Bytes) -> Result<(), LoadError> {
    match progress(LoadProgress { done, total }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(LoadError::Cancelled),
    }
}

fn open_files(sources: &[TensorSource]) -> Result<HashMap<Arc<Path>, OpenFile>, LoadError> {
    let mut files: HashMap<Arc<Path>, OpenFile> = HashMap::new();
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
fn check(sources: &[TensorSource], files: &HashMap<Arc<Path>, OpenFile>) -> Result<(), LoadError> {
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
    files: &'a HashMap<Arc<Path>, OpenFile>,
) -> Result<Vec<Task<'a>>, LoadError> {
    let mut tasks = Vec::new();
    for (source, numbers) in sources.iter().zip(numbers) {
        let file = files
            .get(&source.file)
            .ok_or_else(|| LoadError::Unsupported(format!("tensor {} has no file", source.name)))?;
        let width = source.stored.width() as u64;
        let mut rest = numbers.part();
        for range in &source.ranges {
            let (mut offset, end) = (range.offset, range.offset + range.length);
            while offset < end {
                // CHUNK is a multiple of every width, so that no number is cut apart.
                let bytes = CHUNK.min(end - offset);
                let count = (bytes / width) as usize;
                let (part, behind) = rest.split(count);
                rest = behind;
                let bytes_on_card = (count * source.target.size_in_bytes()) as u64;
                tasks.push(Task {
                    part,
                    source,
                    file,
                    offset,
                    bytes_on_card,
                });
                offset += bytes;
            }
        }
    }
    Ok(tasks)
}

/// Does the reads on several threads, while this one tells progress.
fn run(tasks: Vec<Task<'_>>, total: Bytes, progress: Progress<'_>) -> Result<(), LoadError> {
    let wanted = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MOST_THREADS);
    let threads = wanted.min(tasks.len());
    let queue = Mutex::new(tasks.into_iter());
    let stop = AtomicBool::new(false);
    let (tell_done, done_parts) = mpsc::channel::<Result<u64, LoadError>>();

    // Threads of their own rather than rayon's: candle may be busy in that pool, and a caller that runs in it
    // would wait for itself.
    let work = |tell_done: mpsc::Sender<Result<u64, LoadError>>| {
        while !stop.load(Relaxed) {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(task) = next else { break };
            // Nobody listens any more after an error: the flag ends this loop.
            let _ = tell_done.send(carry_out(task));
        }
    };

    std::thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..threads {
            let tell_done = tell_done.clone();
            let work = &work;
            let thread = std::thread::Builder::new().name("moored-read".to_owned());
            match thread.spawn_scoped(scope, move || work(tell_done)) {
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
    match task.part.read(&task.file.file, task.offset, task.source.stored) {
        Ok(()) => Ok(task.bytes_on_card),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(damaged(
            &task.file.path,
            format!("it ended inside tensor {}", task.source.name),
        )),
        Err(error) => Err(io(&task.file.path, error)),
    }
}

fn no_conversion(source: &TensorSource) -> LoadError {
    LoadError::Unsupported(format!(
        "tensor {}, stored as {:?}, is not read as {:?} into system memory",
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
