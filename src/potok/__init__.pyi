from potok.batching import DynamicBatcher as DynamicBatcher
from potok.errors import ClientError as ClientError
from potok.errors import DeadlineExceeded as DeadlineExceeded
from potok.errors import EngineDead as EngineDead
from potok.errors import LoadError as LoadError
from potok.errors import PotokError as PotokError
from potok.errors import ServerError as ServerError
from potok.errors import Unavailable as Unavailable
from potok.llm import LLM as LLM
from potok.llm import AsyncLLM as AsyncLLM
from potok.llm import CompletionOutput as CompletionOutput
from potok.llm import RequestOutput as RequestOutput
from potok.params import SamplingParams as SamplingParams

__version__: str
