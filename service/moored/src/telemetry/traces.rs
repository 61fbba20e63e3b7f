//! A trace of OpenTelemetry for each job: a span from its acceptance to its end, and in it one for each wait for memory, each move of
//! weights and each stage. A collector gets them by OTLP; what it does not take is lost, and nothing waits for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use calls::told;
use engine::Error;
use engine::job::{Call, JobEventKind, JobId, StageReport};
use engine::queue::{Happening, ObservedJob, Observer};
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

/// How long the end of the service waits for the collector.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Traces jobs to a collector.
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    /// The spans of the jobs that have not ended.
    jobs: Mutex<HashMap<JobId, Context>>,
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").finish_non_exhaustive()
    }
}

impl Traces {
    /// Traces to the collector at this address. It is connected to when there is something to send.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub(crate) fn to(address: &str) -> Result<Traces, ExporterBuildError> {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(address)
            .build()?;
        let service = Resource::builder_empty().with_attributes([
            KeyValue::new("service.name", "moored"),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ]);
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(service.build())
            .build();
        Ok(Traces {
            tracer: provider.tracer("moored"),
            provider,
            jobs: Mutex::default(),
        })
    }

    /// Sends what was not sent yet. Called once, at the end.
    pub(crate) fn end(&self) {
        if let Err(problem) = self.provider.shutdown_with_timeout(LAST_SPANS) {
            tracing::warn!(%problem, "the last spans were not sent to log.otlp");
        }
    }

    fn jobs(&self) -> std::sync::MutexGuard<'_, HashMap<JobId, Context>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner) // a panic leaves it valid
    }

    fn accepted(&self, job: ObservedJob<'_>) {
        let carrier = HashMap::from([("traceparent".to_owned(), job.trace.to_owned())]);
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier);
        let mut attributes = vec![
            KeyValue::new("moored.job", job.id.to_string()),
            KeyValue::new("moored.client", job.client.to_owned()),
            // The conventions of OpenTelemetry for generative models.
            KeyValue::new("gen_ai.request.model", job.model.to_owned()),
        ];
        let made = match job.call {
            Call::GenerateImage => Some("image"),
            Call::GenerateVideo => Some("video"),
            Call::GenerateAudio | Call::StreamAudio => Some("audio"),
            Call::EncodeImage | Call::DecodeLatent | Call::Load | Call::Plan => None,
        };
        if let Some(made) = made {
            attributes.push(KeyValue::new("gen_ai.operation.name", "generate_content"));
            attributes.push(KeyValue::new("gen_ai.output.type", made));
        }
        let span = SpanBuilder::from_name(job.call.as_str())
            .with_kind(SpanKind::Server)
            .with_start_time(ago(job.age))
            .with_attributes(attributes);
        let span = self.tracer.build_with_context(span, &parent);
        self.jobs().insert(job.id.clone(), parent.with_span(span));
    }

    /// A span of a job that began so long ago, and ends as long ago as `ended`.
    fn part(
        &self,
        job: ObservedJob<'_>,
        name: String,
        (began, ended): (Duration, Duration),
        with: Vec<KeyValue>,
    ) {
        let jobs = self.jobs();
        let Some(context) = jobs.get(job.id) else { return };
        let span = SpanBuilder::from_name(name)
            .with_start_time(ago(began))
            .with_attributes(with);
        let mut span = self.tracer.build_with_context(span, context);
        span.end_with_timestamp(ago(ended));
    }

    fn stage(&self, job: ObservedJob<'_>, report: &StageReport) {
        let card = || KeyValue::new("moored.card", report.card.clone());
        let (run, moves) = (report.run, report.moves);
        if !moves.is_zero() {
            let name = format!("move for {}", report.name);
            self.part(job, name, (run + moves, run), vec![card()]);
        }
        let bytes = |bytes: residency::Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
        let attributes = vec![
            card(),
            KeyValue::new("moored.cached", report.cached),
            KeyValue::new("moored.chunking", report.chunking.clone()),
            KeyValue::new("moored.attention", report.attention.clone()),
            KeyValue::new("moored.item", i64::from(report.item)),
            KeyValue::new("moored.peak_bytes", bytes(report.peak_bytes)),
            KeyValue::new("moored.peak_scratch_bytes", bytes(report.peak_scratch)),
            KeyValue::new("moored.predicted_scratch_bytes", bytes(report.predicted_scratch)),
        ];
        self.part(job, report.name.to_string(), (run, Duration::ZERO), attributes);
    }

    fn ended(&self, job: ObservedJob<'_>, result: Result<(), &Error>) {
        let Some(context) = self.jobs().remove(job.id) else {
            return;
        };
        let span = context.span();
        if let Err(error) = result {
            span.set_attribute(KeyValue::new("error.type", told(error).reason));
            span.set_status(Status::error(error.to_string()));
        }
        span.end();
    }
}

impl Observer for Traces {
    fn happened(&self, happening: &Happening<'_>) {
        match happening {
            Happening::Event {
                job,
                event: JobEventKind::Accepted { joined: false },
            } => self.accepted(*job),
            Happening::Waited { job, cause, lasted } => self.part(
                *job,
                "wait for memory".to_owned(),
                (*lasted, Duration::ZERO),
                vec![KeyValue::new("moored.cause", *cause)],
            ),
            Happening::Stage { job, report } => self.stage(*job, report),
            Happening::Ended { job, result, .. } => self.ended(*job, *result),
            Happening::Event { .. }
            | Happening::Loaded { .. }
            | Happening::Unloaded { .. }
            | Happening::WorkerLost { .. } => {}
        }
    }
}

fn ago(time: Duration) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(time).unwrap_or(now)
}
