//! Compiles plans on background threads, before a stage requests them. Compiling takes some tenths of a second of one
//! core and no resource of the card, so that many plans are compiled in parallel, while weights are loaded.
//!
//! A thread produces the plan's serialized text, which the stage's handle loads in a millisecond. Best effort: a
//! stage compiles a plan itself if none is ready.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Outcome, REMEMBERED};

/// Maximum of threads per card, and no more than there are cores.
const THREADS: usize = 8;

/// Compiles one plan to text, with a thread's own handle.
pub(super) type Make<M> = Box<dyn FnOnce(&M) -> Outcome<Vec<u8>> + Send>;

/// Creates a thread's state, or reuses that of a thread that has ended. Called on the thread.
pub(super) type Open<M> = Box<dyn Fn(Option<M>) -> Outcome<M> + Send + Sync>;

/// Plans of one card that are compiled in the background, by the keys of their folder.
pub(super) struct Ahead<M>(Arc<Shared<M>>);

struct Shared<M> {
    state: Mutex<State<M>>,
    /// Signalled when a plan is finished or a thread ends.
    changed: Condvar,
    open: Open<M>,
    most_threads: usize,
}

struct State<M> {
    plans: HashMap<String, PlanState>,
    queue: VecDeque<(String, Make<M>)>,
    threads: usize,
    /// States of threads that have ended. Never destroyed: that would wait for the card.
    idle: Vec<M>,
}

/// State of a plan.
enum PlanState {
    /// In the queue.
    Queued,
    /// Being compiled.
    UnderWay,
    /// The compiled text, or the refusal of this shape.
    Ready(Outcome<Vec<u8>>),
    /// Fetched, or failed for a reason other than its shape.
    Closed,
}

impl PlanState {
    /// Whether it is queued or being compiled.
    fn is_pending(&self) -> bool {
        matches!(self, PlanState::Queued | PlanState::UnderWay)
    }
}

impl<M> Clone for Ahead<M> {
    fn clone(&self) -> Ahead<M> {
        Ahead(Arc::clone(&self.0))
    }
}

impl<M: Send + 'static> Ahead<M> {
    pub(super) fn new(open: Open<M>) -> Ahead<M> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Ahead::of_threads(open, cores.min(THREADS))
    }

    pub(super) fn of_threads(open: Open<M>, most_threads: usize) -> Ahead<M> {
        Ahead(Arc::new(Shared {
            state: Mutex::new(State {
                plans: HashMap::new(),
                queue: VecDeque::new(),
                threads: 0,
                idle: Vec::new(),
            }),
            changed: Condvar::new(),
            open,
            most_threads,
        }))
    }

    /// Enqueues plans, in order. A plan that was requested before is ignored. Returns at once.
    pub(super) fn ask(&self, wanted: impl IntoIterator<Item = (String, Make<M>)>) {
        let mut state = self.0.lock();
        for (key, make) in wanted {
            if state.plans.contains_key(&key) {
                continue;
            }
            if state.plans.len() >= REMEMBERED {
                state.plans.retain(|_, stand| stand.is_pending());
            }
            state.plans.insert(key.clone(), PlanState::Queued);
            state.queue.push_back((key, make));
        }
        let wanted = state.queue.len().min(self.0.most_threads);
        while state.threads < wanted {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("plans".to_owned());
            if let Err(error) = thread.spawn(move || make_plans(&shared)) {
                tracing::debug!(%error, "no thread makes plans ahead: stages make them");
                break;
            }
            state.threads += 1;
        }
    }

    /// Takes a requested plan, once: its text, or the refusal of this shape. Waits for a plan that is being compiled.
    /// `None`: the caller compiles it.
    pub(super) fn fetch(&self, key: &str) -> Option<Outcome<Vec<u8>>> {
        let mut state = self.0.lock();
        loop {
            match state.plans.get_mut(key)? {
                PlanState::UnderWay => {
                    state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                stand => {
                    let was = std::mem::replace(stand, PlanState::Closed);
                    return match was {
                        PlanState::Ready(outcome) => Some(outcome),
                        // The caller is faster than the queue.
                        PlanState::Queued => {
                            state.queue.retain(|(queued, _)| queued != key);
                            None
                        }
                        PlanState::UnderWay | PlanState::Closed => None,
                    };
                }
            }
        }
    }

    /// Waits until a requested plan is finished, without taking it. Returns whether there is something to fetch.
    pub(super) fn is_made(&self, key: &str) -> bool {
        let mut state = self.0.lock();
        loop {
            match state.plans.get(key) {
                Some(PlanState::Ready(outcome)) => return outcome.is_ok(),
                // Without a thread, queued plans are never compiled.
                Some(PlanState::Queued) if state.threads == 0 => return false,
                Some(PlanState::Queued | PlanState::UnderWay) => {
                    state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Some(PlanState::Closed) | None => return false,
            }
        }
    }

    /// Whether all requested plans are finished.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        !self.0.lock().plans.values().any(PlanState::is_pending)
    }
}

impl<M> Shared<M> {
    fn lock(&self) -> MutexGuard<'_, State<M>> {
        // No operation under the lock panics midway, so the state is consistent after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next plan to compile. If there is none, the thread stores its state for reuse, and ends.
    fn next(&self, thread: &mut Thread<'_, M>) -> Option<(UnderWay<'_, M>, Make<M>)> {
        let mut state = self.lock();
        let Some((key, make)) = state.queue.pop_front() else {
            state.idle.extend(thread.maker.take());
            state.threads -= 1;
            thread.has_ended = true;
            drop(state);
            self.changed.notify_all();
            return None;
        };
        state.plans.insert(key.clone(), PlanState::UnderWay);
        let under_way = UnderWay {
            shared: self,
            key,
            becomes: PlanState::Closed,
        };
        Some((under_way, make))
    }
}

/// The body of a thread. A panic ends it, and the drop of its guards restores `Shared`.
fn make_plans<M>(shared: &Shared<M>) {
    let mut thread = Thread {
        shared,
        maker: None,
        has_ended: false,
    };
    let idle = shared.lock().idle.pop();
    match (shared.open)(idle) {
        Ok(maker) => thread.maker = Some(maker),
        Err(failure) => return tracing::debug!(%failure, "no plans are made ahead: stages make them"),
    }
    while let Some((mut under_way, make)) = shared.next(&mut thread) {
        let Some(maker) = &thread.maker else { return };
        match make(maker) {
            Err(failure) if !failure.is_of_the_shape() => {
                tracing::debug!(%failure, "a plan was not made ahead: the stage makes it");
            }
            outcome => under_way.becomes = PlanState::Ready(outcome),
        }
    }
}

/// Guard of a running thread, for the count of threads.
struct Thread<'a, M> {
    shared: &'a Shared<M>,
    maker: Option<M>,
    has_ended: bool,
}

impl<M> Drop for Thread<'_, M> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.lock().threads -= 1;
            self.shared.changed.notify_all();
        }
    }
}

/// Guard of a plan being compiled: waiters are notified on drop, whatever the outcome.
struct UnderWay<'a, M> {
    shared: &'a Shared<M>,
    key: String,
    becomes: PlanState,
}

impl<M> Drop for UnderWay<'_, M> {
    fn drop(&mut self) {
        let becomes = std::mem::replace(&mut self.becomes, PlanState::Closed);
        self.shared
            .lock()
            .plans
            .insert(std::mem::take(&mut self.key), becomes);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::super::Failure;
    use super::*;

    fn of_threads(threads: usize) -> Ahead<()> {
        Ahead::of_threads(Box::new(|_| Ok(())), threads)
    }

    fn wanted(key: &str, make: impl FnOnce() -> Outcome<Vec<u8>> + Send + 'static) -> (String, Make<()>) {
        (key.to_owned(), Box::new(move |()| make()))
    }

    /// Waits until all plans are finished.
    fn settle(ahead: &Ahead<()>) {
        while !ahead.is_idle() {
            std::thread::yield_now();
        }
    }

    fn failure(status: i32) -> Failure {
        Failure {
            status,
            ..Failure::ours("as a test wants it")
        }
    }

    #[test]
    fn a_plan_is_compiled_once_and_fetched_once() {
        let ahead = of_threads(2);
        let made = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            let made = Arc::clone(&made);
            ahead.ask([wanted("a", move || {
                made.fetch_add(1, Ordering::Relaxed);
                Ok(b"plan".to_vec())
            })]);
        }
        assert!(ahead.fetch("never asked for").is_none());
        settle(&ahead);
        assert_eq!(ahead.fetch("a"), Some(Ok(b"plan".to_vec())));
        assert_eq!(made.load(Ordering::Relaxed), 1);
        assert_eq!(ahead.fetch("a"), None, "whoever wants it again has it");
        ahead.ask([wanted("a", || panic!("it was made already"))]);
        assert!(ahead.is_idle());
        assert_eq!(ahead.fetch("a"), None);
    }

    #[test]
    fn fetching_waits_for_a_plan_that_is_being_compiled() {
        let ahead = of_threads(1);
        let (started, has_started) = channel();
        let (go, may_go) = channel();
        let (look, is_looked_for) = channel::<()>();
        ahead.ask([wanted("a", move || {
            started.send(()).unwrap();
            may_go.recv().unwrap();
            Ok(b"plan".to_vec())
        })]);
        has_started.recv().unwrap();
        std::thread::spawn(move || {
            is_looked_for.recv().unwrap();
            go.send(()).unwrap();
        });
        look.send(()).unwrap();
        assert_eq!(ahead.fetch("a"), Some(Ok(b"plan".to_vec())));
    }

    #[test]
    fn waiting_for_a_plan_does_not_fetch_it() {
        let ahead = of_threads(1);
        let (go, may_go) = channel();
        let waits = ahead.clone();
        ahead.ask([
            wanted("a", move || {
                may_go.recv().unwrap();
                Ok(b"plan".to_vec())
            }),
            wanted("b", || Err(failure(3000))),
        ]);
        let found = std::thread::spawn(move || [waits.is_made("a"), waits.is_made("b")]);
        go.send(()).unwrap();
        assert_eq!(found.join().unwrap(), [true, false]);
        assert_eq!(ahead.fetch("a"), Some(Ok(b"plan".to_vec())));
        assert!(!ahead.is_made("a"), "it was fetched");
        assert!(!ahead.is_made("never asked for"));
        // If no thread can start, nothing waits.
        let nobody = Ahead::of_threads(Box::new(|_: Option<()>| Err(failure(5000))), 1);
        nobody.ask([wanted("a", || Ok(Vec::new()))]);
        assert!(!nobody.is_made("a"));
    }

    #[test]
    fn a_queued_plan_is_left_to_its_caller() {
        let ahead = of_threads(1);
        let (started, has_started) = channel();
        let (go, may_go) = channel();
        ahead.ask([
            wanted("a", move || {
                started.send(()).unwrap();
                may_go.recv().unwrap();
                Ok(b"a".to_vec())
            }),
            wanted("b", || panic!("its stage makes it")),
            wanted("c", || Ok(b"c".to_vec())),
        ]);
        has_started.recv().unwrap();
        assert_eq!(ahead.fetch("b"), None);
        go.send(()).unwrap();
        assert_eq!(ahead.fetch("a"), Some(Ok(b"a".to_vec())));
        settle(&ahead);
        assert_eq!(
            ahead.fetch("c"),
            Some(Ok(b"c".to_vec())),
            "the thread lives: it did not make b"
        );
    }

    #[test]
    fn several_plans_are_compiled_in_parallel() {
        let ahead = of_threads(2);
        let together = Arc::new(Barrier::new(3));
        for key in ["a", "b"] {
            let together = Arc::clone(&together);
            ahead.ask([wanted(key, move || {
                together.wait(); // for the other one
                Ok(key.as_bytes().to_vec())
            })]);
        }
        together.wait();
        for key in ["a", "b"] {
            assert_eq!(ahead.fetch(key), Some(Ok(key.as_bytes().to_vec())));
        }
    }

    #[test]
    fn refusals_are_returned_and_other_failures_are_left_to_the_stage() {
        for status in [2000, 3000, 4003, 5003] {
            let ahead = of_threads(1);
            let (started, has_started) = channel();
            ahead.ask([wanted("a", move || {
                started.send(()).unwrap();
                Err(failure(status))
            })]);
            has_started.recv().unwrap();
            let expected = (status < 4000).then(|| Err(failure(status)));
            assert_eq!(ahead.fetch("a"), expected, "{status}");
        }
    }

    #[test]
    fn a_thread_that_panics_or_cannot_start_blocks_no_caller() {
        let ahead = of_threads(1);
        let (started, has_started) = channel();
        ahead.ask([wanted("a", move || {
            started.send(()).unwrap();
            panic!("as a test wants it")
        })]);
        has_started.recv().unwrap();
        assert_eq!(ahead.fetch("a"), None);
        // Another thread compiles the next request, as soon as that one is gone.
        while ahead.0.lock().threads > 0 {
            std::thread::yield_now();
        }
        ahead.ask([wanted("b", || Ok(b"b".to_vec()))]);
        settle(&ahead);
        assert_eq!(ahead.fetch("b"), Some(Ok(b"b".to_vec())));

        let opens: [Open<()>; 2] = [
            Box::new(|_| Err(failure(5000))),
            Box::new(|_| panic!("as a test wants it")),
        ];
        for open in opens {
            let ahead = Ahead::of_threads(open, 2);
            ahead.ask([wanted("a", || Ok(Vec::new()))]);
            assert_eq!(ahead.fetch("a"), None);
        }
    }

    #[test]
    fn a_thread_reuses_the_state_of_an_ended_thread() {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&opened);
        let open = move |idle: Option<()>| {
            if idle.is_none() {
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let ahead = Ahead::of_threads(Box::new(open), 1);
        for key in ["a", "b", "c"] {
            let (started, has_started) = channel();
            ahead.ask([wanted(key, move || {
                started.send(()).unwrap();
                Ok(Vec::new())
            })]);
            has_started.recv().unwrap();
            assert_eq!(ahead.fetch(key), Some(Ok(Vec::new())));
        }
        assert_eq!(opened.load(Ordering::Relaxed), 1);
    }
}
