//! `moored mcp`: the tools of a service for agents that start programs and speak to them by their standard input and output, a message of
//! the Model Context Protocol a line. Each message goes to the service's own endpoint, and its answers come back as lines.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use config::ClientSettings;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tonic::body::Body;
use tonic::codegen::http::header::{ACCEPT, CONTENT_TYPE};
use tonic::codegen::http::{HeaderValue, Method, Request, Response};

use crate::CliError;
use crate::connection::Connection;

/// The endpoint of the service.
const PATH: &str = "/mcp";
const SESSION: &str = "mcp-session-id";
const VERSION: &str = "mcp-protocol-version";
/// The version of a message that belongs to no session, in its metadata.
const VERSION_OF_MESSAGE: &str = "io.modelcontextprotocol/protocolVersion";
/// Codes of JSON-RPC for what is no JSON, and for an error of this program.
const PARSE_ERROR: i32 = -32700;
const INTERNAL: i32 = -32603;

/// The session of the agent.
#[derive(Clone, Default)]
struct Session(Arc<Mutex<Terms>>);

#[derive(Default)]
struct Terms {
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, Terms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a panic leaves it valid
    }
}

/// Passes messages on until standard input ends.
///
/// # Errors
/// When the service cannot be reached at the start, or standard output is closed.
pub(super) async fn run(client: &ClientSettings) -> Result<(), CliError> {
    let connection = Connection::open(client).await?;
    let (answers, mut answered) = mpsc::channel::<Bytes>(16);
    let writing = tokio::spawn(async move {
        let mut output = tokio::io::stdout();
        while let Some(line) = answered.recv().await {
            output.write_all(&line).await?;
            output.write_all(b"\n").await?;
            output.flush().await?;
        }
        Ok(())
    });
    let session = Session::default();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut under_way = JoinSet::new();
    let mut requests: HashMap<String, AbortHandle> = HashMap::new();
    while let Ok(Some(line)) = lines.next_line().await {
        if line.trim().is_empty() {
            continue;
        }
        while under_way.try_join_next().is_some() {}
        requests.retain(|_, request| !request.is_finished());
        let message = match serde_json::from_str(&line) {
            Ok(message) => message,
            Err(problem) => {
                let error = error_of(
                    &Value::Null,
                    PARSE_ERROR,
                    &format!("the message is no JSON: {problem}"),
                );
                let _ = answers.send(error).await; // it is closed at the next answer
                continue;
            }
        };
        let cancelled = cancelled_by(&message).and_then(|id| requests.remove(&id));
        let id = message.get("id").map(Value::to_string);
        let is_first = message.get("method").and_then(Value::as_str) == Some("initialize");
        let sent = exchange(
            connection.clone(),
            session.clone(),
            line,
            message,
            answers.clone(),
        );
        if let Some(request) = cancelled {
            // After the message itself: a service without a session sees that the agent has left.
            under_way.spawn(async move {
                sent.await;
                request.abort();
            });
            continue;
        }
        if is_first {
            sent.await; // what follows belongs to its session
            continue;
        }
        let request = under_way.spawn(sent);
        if let Some(id) = id {
            requests.insert(id, request);
        }
    }
    under_way.shutdown().await;
    end(&connection, &session).await;
    drop(answers);
    match writing.await {
        Ok(Err(problem)) => Err(CliError::Output(problem)),
        _ => Ok(()),
    }
}

/// The id of the request that a message cancels.
fn cancelled_by(message: &Value) -> Option<String> {
    let method = message.get("method")?.as_str()?;
    let id = message.pointer("/params/requestId")?;
    (method == "notifications/cancelled").then(|| id.to_string())
}

/// Sends a message, and passes its answers on.
async fn exchange(
    connection: Connection,
    session: Session,
    line: String,
    message: Value,
    answers: mpsc::Sender<Bytes>,
) {
    let id = message.get("id").cloned();
    let answered = async {
        let request = request_of(&session, &message, line)?;
        let response = connection
            .http(request)
            .await
            .map_err(|problem| problem.to_string())?;
        passed_on(response, &session, &message, &answers).await
    };
    if let (Err(problem), Some(id)) = (answered.await, id) {
        let _ = answers.send(error_of(&id, INTERNAL, &problem)).await; // it is closed at the next answer
    }
}

fn request_of(session: &Session, message: &Value, line: String) -> Result<Request<Body>, String> {
    let text = |value: &Value| HeaderValue::from_str(value.as_str()?).ok();
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(PATH)
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, "application/json, text/event-stream");
    {
        let terms = session.lock();
        if let Some(id) = &terms.id {
            request = request.header(SESSION, id);
        }
        let of_message = message
            .pointer("/params/_meta")
            .and_then(|meta| text(meta.get(VERSION_OF_MESSAGE)?));
        if let Some(version) = of_message.as_ref().or(terms.version.as_ref()) {
            request = request.header(VERSION, version);
        }
    }
    if let Some(method) = message.get("method").and_then(text) {
        request = request.header("mcp-method", method);
    }
    let params = message.get("params");
    let name = params.and_then(|params| params.get("name").or_else(|| params.get("uri")));
    if let Some(name) = name.and_then(text) {
        request = request.header("mcp-name", name);
    }
    request
        .body(Body::new(line))
        .map_err(|problem| problem.to_string())
}

/// Passes the messages of an answer on.
async fn passed_on(
    response: Response<Body>,
    session: &Session,
    message: &Value,
    answers: &mpsc::Sender<Bytes>,
) -> Result<(), String> {
    let headers = response.headers();
    if let Some(id) = headers.get(SESSION) {
        session.lock().id = Some(id.clone());
    }
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_stream = kind.is_some_and(|kind| kind.starts_with("text/event-stream"));
    let status = response.status();
    let mut body = response.into_body();
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|problem| problem.message().to_owned())?;
        let Ok(data) = frame.into_data() else { continue };
        read.extend_from_slice(&data);
        while is_stream && let Some(end) = read.iter().position(|byte| *byte == b'\n') {
            let line = read.split_to(end + 1).freeze();
            // Each message is one line, as it has no line breaks.
            let data = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii);
            if let Some(data) = data.filter(|data| !data.is_empty()) {
                remember_version(session, message, data);
                let _ = answers.send(line.slice_ref(data)).await; // closed: the agent has left
            }
        }
    }
    if is_stream || read.is_empty() {
        return Ok(());
    }
    let answer: Value =
        serde_json::from_slice(&read).map_err(|_| format!("the service answers HTTP {status}"))?;
    if answer.get("jsonrpc").is_none() {
        // A refusal by the transport.
        let told = answer.pointer("/error/message").and_then(Value::as_str);
        return Err(told.map_or_else(|| format!("the service answers HTTP {status}"), str::to_owned));
    }
    remember_version(session, message, &read);
    let _ = answers.send(answer.to_string().into()).await; // closed: the agent has left
    Ok(())
}

/// The version that the service has chosen in its answer to `initialize`.
fn remember_version(session: &Session, message: &Value, answer: &[u8]) {
    if message.get("method").and_then(Value::as_str) != Some("initialize") {
        return;
    }
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let version = answer.pointer("/result/protocolVersion").and_then(Value::as_str);
    if let Some(version) = version.and_then(|version| HeaderValue::from_str(version).ok()) {
        session.lock().version = Some(version);
    }
}

/// Ends the session.
async fn end(connection: &Connection, session: &Session) {
    let Some(id) = session.lock().id.clone() else {
        return;
    };
    let request = Request::builder()
        .method(Method::DELETE)
        .uri(PATH)
        .header(SESSION, id)
        .body(Body::empty());
    if let Ok(request) = request {
        let _ = connection.http(request).await; // else it ends by itself in some minutes
    }
}

/// An error of JSON-RPC.
fn error_of(id: &Value, code: i32, message: &str) -> Bytes {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
        .to_string()
        .into()
}
