//! A service inside of this program, for commands that need one while they last.

use std::time::Duration;

use access::{Secret, TokenStore};
use config::{ClientSettings, Config};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::connection::Connection;
use crate::exit::Exit;
use crate::{CliError, Program, ServiceProblem, interrupt};

/// Timeout of a worker's start.
const START_LIMIT: Duration = Duration::from_secs(120);

/// A service that runs for as long as a command.
pub(super) struct LocalService {
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServiceProblem>>,
}

impl LocalService {
    /// Starts a service, waits until a card is ready, and returns a connection to it.
    pub(super) async fn start(
        program: &dyn Program,
        mut config: Config,
    ) -> Result<(LocalService, Connection), CliError> {
        let client = config.client.clone();
        config.service.certificates = None; // it listens on loopback, for this command
        // Where others need a token, this command is the only client.
        let token = match TokenStore::of(&config.service.state).is_there()? {
            true => Some(Secret::new()?),
            false => None,
        };
        config.service.own_token.clone_from(&token);
        let token_file = config.service.token_file.clone();
        let (ready, address) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(program.serve(config, Some(ready), Some(stopped)));
        let service = LocalService { stop, served };
        let started = async {
            let ended = |_| {
                CliError::Failed("the service ended before it listened: its messages above say why, and `moored doctor` checks the configuration".to_owned())
            };
            let address = address.await.map_err(ended)?;
            let client = ClientSettings {
                endpoint: format!("http://{address}"),
                token,
                token_file,
                fingerprint: None, // that of another service: this one has no certificate
                ..client
            };
            let connection = Connection::open(&client).await?;
            is_ready(&connection, &client.endpoint).await?;
            Ok(connection)
        };
        match interrupt::or(started).await {
            Ok(connection) => Ok((service, connection)),
            Err(problem) => Err(service.end_after(problem).await),
        }
    }

    /// Ends the service once its jobs have ended, and returns the outcome of the calls to it.
    pub(super) async fn end_with(self, outcome: Result<(), CliError>) -> Result<(), CliError> {
        match outcome {
            Ok(()) => self.end().await,
            Err(problem) => Err(self.end_after(problem).await),
        }
    }

    /// Ends the service after a call to it failed, and returns the error to report. Where the service may have ended by itself, that is its
    /// own error, or the signal that ended it: a signal reaches the service and this command at the same time, and the service may close the
    /// connection first.
    async fn end_after(self, problem: CliError) -> CliError {
        let may_have_ended = matches!(
            Exit::of(&problem),
            Exit::NoService | Exit::TryAgain | Exit::Failed
        );
        match self.end().await {
            Err(of_service) if may_have_ended => of_service,
            Ok(()) if may_have_ended => interrupt::instead_of(problem).await,
            _ => problem,
        }
    }

    async fn end(self) -> Result<(), CliError> {
        drop(self.stop);
        let served = self.served.await;
        Ok(served.map_err(|panic| CliError::Failed(panic.to_string()))??)
    }
}

/// Waits for `SERVING` by grpc.health.v1: the service answers before its worker is ready.
async fn is_ready(connection: &Connection, endpoint: &str) -> Result<(), CliError> {
    let mut health = connection.health();
    let watch = async {
        let mut states = health.watch(HealthCheckRequest::default()).await?.into_inner();
        while let Some(state) = states.message().await? {
            if state.status() == ServingStatus::Serving {
                return Ok(());
            }
        }
        Err(tonic::Status::unavailable("the service ended"))
    };
    match tokio::time::timeout(START_LIMIT, watch).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(CliError::Unreachable {
            endpoint: endpoint.to_owned(),
            problem: format!(
                "it was started, and no card of it was ready within {} s: its messages above say why, and `moored doctor` checks the \
                 cards",
                START_LIMIT.as_secs()
            ),
        }),
    }
}
