//! How much a token may do: which models, and how many pixels, seconds and bytes a minute. How many jobs it may have is the queue's to say.
//!
//! What may be done in a minute is a level that refills steadily: a token that has been quiet for a minute may use all of it at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use access::Holder;
use engine::Error;
use engine::job::{JobSpec, JobWork, Run};
use engine::library::Entry;
use model::Medium;
use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);

/// What is counted by the minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Counted {
    Pixels,
    Seconds,
    Bytes,
}

impl Counted {
    /// The name of the limit.
    fn limit(self) -> &'static str {
        match self {
            Counted::Pixels => "pixels_per_minute",
            Counted::Seconds => "seconds_per_minute",
            Counted::Bytes => "bytes_per_minute",
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            Counted::Pixels => "pixels",
            Counted::Seconds => "seconds of films and tracks",
            Counted::Bytes => "bytes that are sent",
        }
    }

    fn most_of(self, holder: &Holder) -> Option<u64> {
        match self {
            Counted::Pixels => holder.allowance.pixels_per_minute,
            Counted::Seconds => holder.allowance.seconds_per_minute,
            Counted::Bytes => holder.allowance.bytes_per_minute,
        }
    }
}

/// What tokens have used of the last minute, by name.
#[derive(Debug, Default)]
pub(crate) struct Allowances {
    used: Mutex<HashMap<(String, Counted), Used>>,
}

/// An amount that shrinks by the limit each minute.
#[derive(Clone, Copy, Debug)]
struct Used {
    amount: f64,
    at: Instant,
}

impl Used {
    fn amount_at(self, now: Instant, most: f64) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64() / MINUTE.as_secs_f64();
        (self.amount - passed * most).max(0.0)
    }
}

/// Amounts that were counted for a job.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Amounts {
    pixels: f64,
    seconds: f64,
}

impl Amounts {
    /// What a job makes.
    fn of(run: &Run) -> Amounts {
        let count = f64::from(run.count.max(1));
        let (pixels, seconds) = match &run.request.medium {
            Medium::Image(image) => (f64::from(image.width) * f64::from(image.height), 0.0),
            Medium::Video(video) => {
                let frames = f64::from(video.frames);
                let rate = f64::from(video.frames_per_second);
                let seconds = if rate > 0.0 { frames / rate } else { 0.0 };
                (f64::from(video.width) * f64::from(video.height) * frames, seconds)
            }
            Medium::Audio(audio) => (0.0, f64::from(audio.seconds)),
        };
        Amounts {
            pixels: pixels * count,
            seconds: seconds * count,
        }
    }
}

impl Allowances {
    /// Counts what a job makes against the token's holder (`None`: no tokens are asked for) before it is accepted.
    ///
    /// # Errors
    /// [`Error::TokenLimit`].
    pub(crate) fn admit(&self, spec: &JobSpec, holder: Option<&Holder>) -> Result<Amounts, Error> {
        let (Some(holder), JobWork::Run(run)) = (holder, &spec.work) else {
            return Ok(Amounts::default());
        };
        let amounts = Amounts::of(run);
        self.take(holder, Counted::Pixels, amounts.pixels)?;
        self.take(holder, Counted::Seconds, amounts.seconds)
            .inspect_err(|_| {
                self.give_back(holder, Counted::Pixels, amounts.pixels);
            })?;
        Ok(amounts)
    }

    /// Takes back what was counted for a job that was not accepted, or that another one already makes.
    pub(crate) fn forget(&self, amounts: Amounts, holder: Option<&Holder>) {
        if let Some(holder) = holder {
            self.give_back(holder, Counted::Pixels, amounts.pixels);
            self.give_back(holder, Counted::Seconds, amounts.seconds);
        }
    }

    /// Counts bytes that a holder sends.
    ///
    /// # Errors
    /// [`Error::TokenLimit`].
    pub(crate) fn receive(&self, bytes: u64, holder: Option<&Holder>) -> Result<(), Error> {
        match holder {
            Some(holder) => self.take(holder, Counted::Bytes, bytes as f64),
            None => Ok(()),
        }
    }

    fn take(&self, holder: &Holder, counted: Counted, amount: f64) -> Result<(), Error> {
        let Some(most) = counted.most_of(holder) else {
            return Ok(());
        };
        let refused = |problem: String, retry_after| Error::TokenLimit {
            limit: counted.limit().into(),
            problem,
            retry_after,
        };
        let (name, what) = (&holder.name, counted.in_words());
        let limit = most as f64;
        if amount > limit {
            let problem = format!(
                "the token {name:?} may have {most} {what} a minute, and this alone has {amount:.0}: ask for less"
            );
            return Err(refused(problem, None));
        }
        let now = Instant::now();
        let mut all = self.lock();
        let used = all
            .get(&(name.clone(), counted))
            .map_or(0.0, |used| used.amount_at(now, limit));
        let over = used + amount - limit;
        // A rounding error must not refuse the last pixel.
        if over > limit * 1e-9 {
            let wait = Duration::from_secs_f64(
                (over / limit * MINUTE.as_secs_f64())
                    .ceil()
                    .min(MINUTE.as_secs_f64()),
            );
            let problem = format!(
                "the token {name:?} may have {most} {what} a minute, and has had {used:.0} in the last one: try again in {} s, or \
                 ask for less",
                wait.as_secs()
            );
            return Err(refused(problem, Some(wait)));
        }
        let amount = used + amount;
        all.insert((name.clone(), counted), Used { amount, at: now });
        Ok(())
    }

    fn give_back(&self, holder: &Holder, counted: Counted, amount: f64) {
        if let Some(used) = self.lock().get_mut(&(holder.name.clone(), counted)) {
            used.amount = (used.amount - amount).max(0.0);
        }
    }

    /// A panic while it is locked leaves the map valid.
    fn lock(&self) -> MutexGuard<'_, HashMap<(String, Counted), Used>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses the model of an entry to a token that may not use it. Whatever a token has done with a model asks here first: a job, a hold, a
/// session.
///
/// # Errors
/// [`Error::TokenLimit`].
pub(crate) fn check_model(entry: &Entry, holder: Option<&Holder>) -> Result<(), Error> {
    let Some(holder) = holder else { return Ok(()) };
    let models = &holder.allowance.models;
    if models.is_empty() || models.contains(&entry.id) {
        return Ok(());
    }
    let listed: Vec<&str> = models.iter().map(String::as_str).collect();
    Err(Error::TokenLimit {
        limit: "models".into(),
        problem: format!(
            "the token {:?} may not use {}: it may use {}",
            holder.name,
            entry.id,
            listed.join(", ")
        ),
        retry_after: None,
    })
}

/// Refuses a job on models that its token may not use: its own, and the one that it replaces.
///
/// # Errors
/// [`Error::TokenLimit`].
pub(crate) fn check_models(spec: &JobSpec, holder: Option<&Holder>) -> Result<(), Error> {
    check_model(&spec.entry, holder)?;
    match &spec.work {
        JobWork::Load {
            replace: Some(old), ..
        } => check_model(old, holder),
        JobWork::Load { replace: None, .. } | JobWork::Run(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use access::{Allowance, Role};
    use engine::job::JobOptions;

    use super::*;

    fn holder(allowance: Allowance) -> Holder {
        Holder {
            name: "alice".to_owned(),
            role: Role::Generate,
            allowance,
        }
    }

    fn retry_of(refused: Result<(), Error>) -> Option<u64> {
        match refused {
            Err(Error::TokenLimit { retry_after, .. }) => retry_after.map(|wait| wait.as_secs()),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_used_comes_back_within_a_minute() {
        let allowances = Allowances::default();
        let alice = holder(Allowance {
            bytes_per_minute: Some(600),
            ..Allowance::default()
        });
        let send = |bytes| allowances.receive(bytes, Some(&alice));
        assert!(send(600).is_ok());
        assert_eq!(retry_of(send(100)), Some(10));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(send(100).is_ok());
        assert_eq!(retry_of(send(1)), Some(1));
        tokio::time::advance(MINUTE).await;
        assert!(send(600).is_ok());
        assert_eq!(retry_of(send(601)), None, "that will never do");
        let other = Holder {
            name: "bob".to_owned(),
            ..alice.clone()
        };
        assert!(allowances.receive(600, Some(&other)).is_ok());
        assert!(allowances.receive(u64::MAX, None).is_ok());
        assert!(
            allowances
                .receive(u64::MAX, Some(&holder(Allowance::default())))
                .is_ok()
        );
    }

    #[test]
    fn a_token_uses_its_own_models_alone_and_replaces_no_other() {
        let entry = |id: &str| {
            let none = model::Quantization::NONE;
            Arc::new(Entry::new(id.to_owned(), String::new(), "/models/m".into(), none))
        };
        let load = |id: &str, old: Option<&str>| JobSpec {
            options: JobOptions::default(),
            entry: entry(id),
            work: JobWork::Load {
                components: Vec::new(),
                replace: old.map(entry),
                prove: false,
            },
        };
        let own = holder(Allowance {
            models: ["tiny".to_owned()].into(),
            ..Allowance::default()
        });
        let any = holder(Allowance::default());
        for (spec, may) in [
            (load("tiny", None), true),
            (load("large", None), false),
            (load("tiny", Some("tiny")), true),
            (load("tiny", Some("large")), false),
        ] {
            assert_eq!(check_models(&spec, Some(&own)).is_ok(), may, "{spec:?}");
            assert!(check_models(&spec, Some(&any)).is_ok() && check_models(&spec, None).is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_that_is_refused_for_one_limit_uses_none_of_another() {
        let allowances = Allowances::default();
        let alice = holder(Allowance {
            pixels_per_minute: Some(100),
            seconds_per_minute: Some(1),
            ..Allowance::default()
        });
        allowances.take(&alice, Counted::Seconds, 1.0).unwrap();
        allowances.take(&alice, Counted::Pixels, 50.0).unwrap();
        let of_job = Amounts {
            pixels: 50.0,
            seconds: 0.0,
        };
        allowances.take(&alice, Counted::Pixels, of_job.pixels).unwrap();
        allowances.forget(of_job, Some(&alice));
        allowances.take(&alice, Counted::Pixels, 50.0).unwrap();
        let refused = allowances.take(&alice, Counted::Pixels, 1.0);
        assert!(
            matches!(
                &refused,
                Err(Error::TokenLimit { limit, .. }) if limit == "pixels_per_minute"
            ),
            "{refused:?}"
        );
    }
}
