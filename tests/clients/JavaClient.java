import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;

/** Posts a body of JSON to each address with Java's default client, and prints the responses, one a line. */
class JavaClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int index = 1; index < arguments.length; index++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[index]))
                .header("Content-Type", "application/json")
                .POST(BodyPublishers.ofString(arguments[0]))
                .build();
            System.out.println(client.send(request, BodyHandlers.ofString()).body());
        }
    }
}
